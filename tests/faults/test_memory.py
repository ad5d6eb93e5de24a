"""A run that needs more memory than there is says what to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.faults import Harm, command, fault, words_of

from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

WHOLE_STEP = "rollout.micro_batch_size_per_gpu=8"


def lacking(owner: type, name: str, fits: Callable[[Any, Any], bool]) -> Harm:
    """Returns a harm: a method fails as a GPU does, for arguments that do not fit."""

    def install() -> None:
        original = getattr(owner, name)

        def called(self: Any, argument: Any, *further: Any) -> Any:
            if not fits(self, argument):
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nFurther lines."
                )
            return original(self, argument, *further)

        setattr(owner, name, called)

    return install


def small_pieces(policy: FlowPolicy, piece: Any) -> bool:
    return len(piece) < 2 or not torch.is_grad_enabled()


def small_chunks(engine: DiffusersEngine, request: Any) -> bool:
    return vars(engine)["_chunk_size"] <= 4


PHASES = {
    "update": (
        lacking(FlowPolicy, "evaluate", small_pieces),
        "actor.ppo_micro_batch_size_per_gpu",
    ),
    "rollout": (
        lacking(DiffusersEngine, "generate", small_chunks),
        "rollout.micro_batch_size_per_gpu",
    ),
}


@fault(
    "memory runs out", "one line names the phase, the keys to lower and the command that computes"
)
@pytest.mark.parametrize("phase", PHASES)
def test_the_message(small: list[str], phase: str) -> None:
    harm, key = PHASES[phase]
    words = words_of(small, WHOLE_STEP, "trainer.val_before_train=false")
    line = command(*words, harm=harm).expect(1).error()
    assert f"out of memory in {phase}: lower {key}" in line
    assert "`flowgrpo-rc plan` computes" in line

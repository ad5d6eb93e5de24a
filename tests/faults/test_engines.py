"""An engine that does not do what the trainer asks ends the run with a line that says what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.faults import Harm, command, fault, has_nan, words_of

from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine


def other_settings(engine: Any, chunks: Iterator[Any]) -> Iterator[Any]:
    for chunk in chunks:
        spec = replace(chunk.batch.spec, guidance_scale=chunk.batch.spec.guidance_scale + 1)
        yield replace(chunk, batch=chunk.batch.replace(spec=spec))


def older_version(engine: Any, chunks: Iterator[Any]) -> Iterator[Any]:
    for chunk in chunks:
        version = chunk.batch.policy_version - 1
        yield replace(chunk, batch=chunk.batch.replace(policy_version=version))


def generating(change: Any) -> Harm:
    def install() -> None:
        original = DiffusersEngine.generate
        DiffusersEngine.generate = lambda self, request: change(self, original(self, request))

    return install


def stale() -> None:
    """Lets the engine take over the first LoRA only."""
    original = DiffusersEngine.sync_weights

    def sync_weights(self: DiffusersEngine, state: Any, version: int) -> None:
        first = {name: tensor * 0 + 1e-3 for name, tensor in state.items()}
        original(self, first, version)

    DiffusersEngine.sync_weights = sync_weights


CASES = {
    "other settings": (generating(other_settings), "sampled with other settings: guidance_scale"),
    "older weights": (generating(older_version), "with the weights of step"),
    "a stale LoRA": (stale, "does not hold the trainer's LoRA of step"),
}


@fault("the engine drifts from what the trainer asks", "the run ends with a line that says how")
@pytest.mark.parametrize("case", CASES)
def test_drift(small: list[str], tmp_path: Any, case: str) -> None:
    harm, message = CASES[case]
    ended = command(*words_of(small), harm=harm)
    assert ended.code == 1, ended.output
    assert "Traceback" not in ended.output
    assert message in ended.output
    assert has_nan(tmp_path / "run") == []

"""A kill in every phase of every kind of run: the same command ends with equal results."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import (
    EVERY,
    Harm,
    Trained,
    command,
    die,
    fault,
    mixed,
    sizes,
    some,
    started,
    words_of,
)
from support.runs import SMALL_TEXT, final_state, num_rows, read_rows

from flowgrpo_rc.cli import main
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.training.trainer import Trainer

MODES = {
    "bypass": ("algorithm.rollout_correction.bypass_mode=true", "rollout.dtype=bf16"),
    "decoupled": ("algorithm.rollout_correction.bypass_mode=false", "rollout.dtype=bf16"),
    "staleness": ("rollout.staleness=1",),
    "auto clip": (
        "algorithm.rollout_correction.bypass_mode=true",
        "actor.diffusion_loss.clip_ratio=auto:4",
    ),
}
PHASES = ("rollout", "old_log_prob", "reward_wait", "update", "sync_weights", "evaluation")


def dies_in(phase: str, number: int) -> Harm:
    """Returns a harm: the process is killed as a phase begins for the `number`th time."""

    def install() -> None:
        original = Trainer._timed
        seen = 0

        def timed(self: Trainer, name: str) -> Any:
            nonlocal seen
            seen += name == phase
            if name == phase and seen == number:
                die()
            return original(self, name)

        Trainer._timed = timed  # type: ignore[method-assign]

    return install


@fault("the process is killed as a phase of a step begins", "the same command gives equal results")
@pytest.mark.parametrize(("mode", "phase"), some(mixed(MODES, PHASES), 4))
def test_phases(
    small: list[str],
    tmp_path: Path,
    trained: Callable[[Sequence[str]], Trained],
    mode: str,
    phase: str,
) -> None:
    settings = [*small, *MODES[mode]]
    words = words_of(settings)
    command(*words, harm=dies_in(phase, 2)).expect(-signal.SIGKILL)
    command(*words).expect(0)
    assert final_state(tmp_path / "run") == trained(settings).state


TEXT = (*SMALL_TEXT, "trainer.total_training_steps=3", "trainer.save_freq=1")


@fault("a text run is killed as a phase of a step begins", "the same command gives equal results")
@pytest.mark.parametrize("phase", some(["update", "rollout", "sync_weights"]))
def test_phases_of_text(
    tmp_path: Path, trained: Callable[[Sequence[str]], Trained], phase: str
) -> None:
    words = words_of(TEXT, f"trainer.output_dir={tmp_path / 'run'}")
    command(*words, harm=dies_in(phase, 2), timeout=300).expect(-signal.SIGKILL)
    command(*words, timeout=300).expect(0)
    assert final_state(tmp_path / "run") == trained(TEXT).state


@fault("a second run starts in a folder that is in use", "it is refused, the first one ends well")
def test_two_runs_in_one_folder(small: list[str], tmp_path: Path, whole: Trained) -> None:
    words = words_of(small)
    with started(lambda: main(words)) as first:
        assert first.wait_until((tmp_path / "run" / "metrics.jsonl").exists), first.output()
        command(*words).expect(2, "is in use by a run")
        first.wait().expect(0)
    assert final_state(tmp_path / "run") == whole.state


# --- Many steps

STEPS = 200 if EVERY == 1 else 24
SOAK = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=5",
    f"trainer.test_freq={STEPS // 2}",
    "data.train_batch_size=2",
    "algorithm.rollout_correction.bypass_mode=true",
)


@fault(f"{STEPS} steps, killed at random about every ten", "equal results, memory and files flat")
def test_soak(small: list[str], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = words_of(small, *SOAK, f"trainer.output_dir={whole}")
    with started(lambda: main(words), timeout=600) as process:
        assert process.wait_for_rows(whole, STEPS // 4)
        early = sizes(process.pid)
        assert process.wait_for_rows(whole, STEPS - 5)
        late = sizes(process.pid)
        process.wait().expect(0)
    print(f"MiB and files after {STEPS // 4} and {STEPS - 5} steps: {early}, {late}")
    assert late[0] - early[0] < 20
    assert late[1] - early[1] < 5  # a file may be open as we look

    words = words_of(small, *SOAK, f"trainer.output_dir={killed}")
    draws = torch.Generator().manual_seed(derive_seed("soak"))
    kills = rows = 0
    while True:
        with started(lambda: main(words), timeout=600) as process:
            rows += 4 + int(torch.randint(12, (), generator=draws))
            if not process.wait_for_rows(killed, rows):
                break
            time.sleep(0.2 * torch.rand((), generator=draws).item())
            process.kill()
            kills += 1
            rows = num_rows(killed)
    process.wait().expect(0)
    print(f"{kills} kills")
    assert kills >= STEPS // 20
    assert final_state(killed) == final_state(whole)
    assert [row["step"] for row in read_rows(killed)] == list(range(STEPS + 1))

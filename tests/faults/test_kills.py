"""A run that dies or is refused at any change of its files goes on as if it had not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
from support.faults import EVERY, Trained, at_change, command, die, fault, some, words_of
from support.runs import final_state

from flowgrpo_rc.commands import train

CHANGES = 89  # a run of `small` has fewer


def refuse() -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@fault("the process is killed at a change of its files", "the same command ends with equal results")
@pytest.mark.parametrize("number", range(0, CHANGES, EVERY))
def test_a_kill_at_any_change(
    small: list[str], tmp_path: Path, whole: Trained, number: int
) -> None:
    assert whole.changes <= CHANGES
    words = words_of(small)
    ended = command(*words, harm=at_change(tmp_path / "run", number, die))
    assert ended.code == (-9 if number < whole.changes else 0), ended.output
    command(*words).expect(0)
    assert final_state(tmp_path / "run") == whole.state


@fault(
    "the disk refuses a change of the run's files", "one line says so, and the run goes on later"
)
@pytest.mark.parametrize("number", range(3, CHANGES, EVERY))
def test_a_refusal_at_any_change(
    small: list[str], tmp_path: Path, whole: Trained, number: int
) -> None:
    words = words_of(small)
    ended = command(*words, harm=at_change(tmp_path / "run", number, refuse))
    if number < whole.changes:
        assert ended.code in (0, 1, 2), ended.output
        assert "Traceback" not in ended.output
        if ended.code:
            assert "No space left on device" in ended.output
    command(*words).expect(0)
    assert final_state(tmp_path / "run") == whole.state


@fault(
    "the disk fills up before the results are written",
    "one line names file and folder, and says that the state is saved",
)
@pytest.mark.parametrize(
    "name", some(["README.md", "report.html", "pytorch_lora_weights.safetensors"], 2)
)
def test_no_room_for_the_results(
    small: list[str], tmp_path: Path, whole: Trained, name: str
) -> None:
    words = words_of(small)
    run = tmp_path / "run"

    def harm() -> None:
        replace = Path.replace

        def replaced(self: Path, target: Path) -> Path:
            return refuse() if target.name == name else replace(self, target)

        Path.replace = replaced  # type: ignore[method-assign]

    place = run if name == "report.html" else run / "lora"
    words_of_error = ("No space left on device", "is saved", f"{run / 'checkpoints'}")
    command(*words, harm=harm).expect(1, *words_of_error, f"{place / name}")
    command(*words).expect(0)
    assert final_state(run) == whole.state


@fault("the process is killed between the last checkpoint and the export", "the LoRA is the newest")
def test_a_kill_before_the_export(begun: Path, small: list[str], whole: Trained) -> None:
    words = words_of(small)

    def harm() -> None:
        train.leave_results = lambda *given: die()

    command(*words, harm=harm).expect(-9)
    command(*words).expect(0)
    name = Path("lora") / "pytorch_lora_weights.safetensors"
    assert (begun / name).read_bytes() == (whole.folder / name).read_bytes()

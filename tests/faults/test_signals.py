"""A run that is asked to stop saves, and the same command ends as if it had not been asked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.faults import (
    Harm,
    Started,
    Trained,
    at_change,
    command,
    fault,
    some,
    started,
    words_of,
)
from support.runs import final_state, read_rows

from flowgrpo_rc.cli import main
from flowgrpo_rc.records.checkpoint import list_checkpoints

HANGS = (
    "reward.terms.jpeg=null",
    f"+reward.terms.mine={{_target_: function, path: '{__name__}:hang'}}",
)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def hang(sample: object, prompt: object) -> float:
    Path("hangs").touch()
    time.sleep(300)
    return 0.0


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture
def interrupted(small: list[str], tmp_path: Path, whole: Trained) -> Callable[[Harm], None]:
    """Runs `small` with a harm that stops it; the same command then ends like a whole run."""

    def run(harm: Harm) -> None:
        command(*words_of(small), harm=harm).expect(75, "stopped early (SIG")
        newest = read_rows(tmp_path / "run")[-1]["step"]
        assert newest < 3
        assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step_{newest}"
        command(*words_of(small)).expect(0)
        assert final_state(tmp_path / "run") == whole.state

    return run


CLOSED_TERMINAL = (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)


@fault("signals ask the run to stop", "exit code 75; the same command ends with equal results")
@pytest.mark.parametrize(
    "signals",
    [CLOSED_TERMINAL, *some([(number,) for number in STOPS])],
    ids=lambda signals: "_".join(number.name for number in signals),
)
def test_signals(interrupted, tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    interrupted(at_change(tmp_path / "run", 20, partial(send, *signals)))


@fault("the terminal closes on a run under nohup", "it goes on to its end")
def test_nohup(small: list[str], tmp_path: Path) -> None:
    def harm() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        at_change(tmp_path / "run", 20, partial(send, signal.SIGHUP))()

    command(*words_of(small), harm=harm).expect(0)
    assert read_rows(tmp_path / "run")[-1]["step"] == 3


def ends_at_next(process: Started) -> bool:
    """Returns whether the process leaves SIGINT to the system, as it does after a first one."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return not caught & 1 << (signal.SIGINT - 1)


@fault(
    "a second SIGINT or SIGTERM while a reward hangs",
    "the process ends at once, as it said after the first",
)
def test_a_second_signal(small: list[str]) -> None:
    with started(lambda: main(words_of(small, *HANGS))) as process:
        assert process.wait_until(Path("hangs").exists), process.output()
        process.send(signal.SIGTERM)
        assert process.wait_until(lambda: ends_at_next(process)), process.output()
        assert process.output().count("stopping after this step; again to end now\n") == 1
        process.send(signal.SIGINT)
        start = time.monotonic()
        ended = process.wait()
    assert time.monotonic() - start < 2
    assert ended.code == -signal.SIGINT
    assert "Traceback" not in ended.output

"""Rollout workers that are lost are replaced, and the run's bits do not change."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.documented import ROOT
from support.faults import Ended, Trained, command, fault, final_state, started, words_of
from support.launching import all_gone, marked

from flowgrpo_rc.cli import main

# Ray may not be imported before a run has told it where to listen.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
ENGINE = "support.worker_engines.Harmful"


@pytest.fixture
def with_workers(small: list[str], tmp_path: Path) -> Callable[..., Ended]:
    """Runs a training with two workers, and settings besides."""

    def run(*settings: str) -> Ended:
        def environment() -> None:
            os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"

        words = words_of(small, "rollout.workers=2", *settings)
        return command(*words, harm=environment, timeout=300)

    return run


def harms(folder: Path, harm: str, times: int) -> list[str]:
    """Returns the settings of an engine that harms its worker so many times."""
    for number in range(times):
        (folder / f"harm_{number}").touch()
    given = {"folder": folder, "harm": harm, "step": 2}
    return [
        f"rollout.name={ENGINE}",
        *(f"+rollout.engine_kwargs.{k}={v}" for k, v in given.items()),
    ]


LOSSES = {
    "killed": ("kill", (), "The actor died unexpectedly"),
    "killed later": ("kill", ("+rollout.engine_kwargs.delay_s=0.1",), "died unexpectedly"),
    "hangs": ("hang", ("rollout.worker_timeout_s=5",), "rollout.worker_timeout_s=5"),
    "raises": ("raise", (), "ArithmeticError: a worker's engine has failed"),
}


def same(run: Path, whole: Trained) -> bool:
    return final_state(run) == whole.state


@fault(
    "a rollout worker is killed, hangs or raises", "another samples its chunk; the bits are equal"
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_worker(
    with_workers: Callable[..., Ended], tmp_path: Path, whole: Trained, loss: str
) -> None:
    harm, settings, reason = LOSSES[loss]
    ended = with_workers(*harms(tmp_path, harm, 1), *settings)
    assert ended.code == 0, ended.output
    assert not list(tmp_path.glob("harm_*"))
    assert "a rollout worker was lost (1 of 3 restarts)" in ended.output
    assert reason in ended.output
    assert same(tmp_path / "run", whole)


@fault("no rollout worker is left", "one line says why, and the same command goes on")
def test_no_worker_is_left(
    with_workers: Callable[..., Ended], tmp_path: Path, whole: Trained
) -> None:
    settings = harms(tmp_path, "raise", 3)
    ended = with_workers(*settings, "rollout.max_restarts=1")
    assert ended.code == 1, ended.output
    assert "error: no rollout worker is left" in ended.output
    assert "a worker's engine has failed" in ended.output
    assert "Traceback" not in ended.output
    ended = with_workers(*settings)
    assert ended.code == 0, ended.output
    assert same(tmp_path / "run", whole)


def listening(pids: Sequence[int]) -> set[str]:
    """Returns the addresses on which processes listen."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in sockets:
                packed = bytes.fromhex(local.partition(":")[0])[-4:]
                found.add(".".join(str(part) for part in reversed(packed)))
    return found


@fault("the trainer of rollout workers is killed or stopped", "no process of the run is left")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left(
    small: list[str], tmp_path: Path, whole: Trained, number: signal.Signals
) -> None:
    words = words_of(small, "rollout.workers=2")
    mark = f"run_of_{tmp_path.name}_{number}"
    run = tmp_path / "run"

    def train() -> int:
        # What a fork puts into its environment, only the processes that it starts show.
        os.environ["FLOWGRPO_RC_TEST"] = mark
        return main(words)

    with started(train, timeout=300) as process:
        while not (run / "checkpoints" / "step_1").exists():
            assert process.poll() is None, process.output()
            time.sleep(0.02)
        assert marked(mark)
        assert listening(marked(mark)) == {"127.0.0.1"}
        process.send(number)
        ended = process.wait()
    assert ended.code == (-number if number == signal.SIGKILL else 75), ended.output
    assert all_gone(mark)
    assert command(*words_of(small)).code == 0  # without workers
    assert same(run, whole)


@fault("a rollout worker is killed while it samples ahead", "equal results")
def test_ahead(
    with_workers: Callable[..., Ended],
    small: list[str],
    tmp_path: Path,
    trained: Callable[[Sequence[str]], Trained],
) -> None:
    ended = with_workers(*harms(tmp_path, "kill", 1), "rollout.staleness=1")
    assert ended.code == 0, ended.output
    assert "a rollout worker was lost" in ended.output
    assert same(tmp_path / "run", trained([*small, "rollout.staleness=1"]))

"""Rollout workers that are lost are replaced, and the run's bits do not change."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.documented import ROOT
from support.faults import (
    Ended,
    Trained,
    command,
    fault,
    final_state,
    sizes,
    started,
    wait_for_rows,
    words_of,
)
from support.launching import all_gone, marked
from support.ray import needs_ray
from support.runs import read_rows

from flowgrpo_rc.cli import main

pytestmark = needs_ray
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
    # A single one, so that the other chunks wait for its successor.
    "hangs": (
        "hang",
        ("rollout.workers=1", "rollout.worker_timeout_s=30"),
        "took longer than rollout.worker_timeout_s=30",
    ),
    "raises": ("raise", (), "ArithmeticError: a worker's engine has failed"),
    "other settings": ("other settings", (), "sampled with other settings: guidance_scale"),
    "other weights": ("other weights", (), "does not hold the trainer's LoRA of step 1"),
}


def same(run: Path, whole: Trained) -> bool:
    return final_state(run) == whole.state


@fault(
    "a rollout worker is killed, hangs, raises or samples something else",
    "another samples its chunk; the bits are equal",
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


REFUSED = {
    "an address where nobody listens": (
        ("rollout.ray_address=127.0.0.1:1",),
        "error: rollout.ray_address=127.0.0.1:1 cannot be reached",
    ),
    "no address": (
        ("rollout.ray_address=there",),
        "error: rollout.ray_address=there cannot be reached",
    ),
    "more GPUs than there are": (
        ("rollout.gpus_per_worker=1",),
        "error: rollout.workers=2: with 1 GPUs each (rollout.gpus_per_worker) they need 2, and of "
        "0 GPUs here 0 train",
    ),
    "other packages": (
        ("rollout.name=support.worker_engines.OtherPackages",),
        "has other packages than the trainer: torch 0.1 there",
    ),
}


@fault("rollout workers cannot start", "one line says why, before anything is trained")
@pytest.mark.parametrize("case", REFUSED)
def test_no_worker_starts(with_workers: Callable[..., Ended], case: str) -> None:
    settings, message = REFUSED[case]
    ended = with_workers(*settings)
    assert ended.code == (1 if case == "other packages" else 2), ended.output
    assert message in ended.output
    assert "Traceback" not in ended.output


@fault("Ray would listen on a network", "the run is refused")
def test_ray_that_was_imported_before(small: list[str]) -> None:
    def import_ray() -> None:
        importlib.import_module("ray")

    ended = command(*words_of(small, "rollout.workers=1"), harm=import_ray)
    assert ended.code == 1, ended.output
    assert "error: rollout.workers: Ray was imported before the run" in ended.output


@fault("the trainer of rollout workers is killed or stopped", "no process of the run is left")
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGKILL, False),
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        (signal.SIGHUP, True),
        (signal.SIGUSR1, True),
    ],
)
def test_no_process_is_left(
    small: list[str], tmp_path: Path, whole: Trained, number: signal.Signals, to_all: bool
) -> None:
    """A terminal and Slurm send a signal to all processes of a group."""
    words = words_of(small, "rollout.workers=2")
    mark = f"run_of_{tmp_path.name}_{number}"
    run = tmp_path / "run"

    def train() -> int:
        # What a fork puts into its environment, only the processes that it starts show.
        os.setpgid(0, 0)
        os.environ["FLOWGRPO_RC_TEST"] = mark
        os.environ["HOME"] = str(tmp_path)
        return main(words)

    with started(train, timeout=300) as process:
        while not (run / "checkpoints" / "step_1").exists():
            assert process.poll() is None, process.output()
            time.sleep(0.02)
        assert marked(mark)
        assert listening(marked(mark)) == {"127.0.0.1"}
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send(number)
        ended = process.wait()
    assert ended.code == (-number if number == signal.SIGKILL else 75), ended.output
    assert all_gone(mark)
    assert not (tmp_path / ".ray").exists()  # where Ray keeps a token for every cluster
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


# Ten steps for each; all of them with FAULTS_EVERY=1.
KILLS = 20 if os.environ.get("FAULTS_EVERY") == "1" else 4
SOAK = (
    f"trainer.total_training_steps={10 * KILLS}",
    "trainer.save_freq=10",
    "trainer.test_freq=0",
    "rollout.staleness=1",
)


def workers(mark: str) -> list[int]:
    """Returns the processes of a run that have an engine."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(mark)}
    return [
        pid
        for pid, name in names.items()
        if name.startswith(b"ray::Worker") and not name.startswith(b"ray::WorkerPool")
    ]


@fault("a random rollout worker is killed every ten steps", "equal results, memory and files flat")
def test_soak(
    small: list[str], tmp_path: Path, trained: Callable[[Sequence[str]], Trained]
) -> None:
    run = tmp_path / "run"
    words = words_of(small, *SOAK, "rollout.workers=2", f"rollout.max_restarts={KILLS}")
    mark = f"soak_of_{tmp_path.name}"
    draws = random.Random("soak")
    found = []

    def train() -> int:
        os.environ["FLOWGRPO_RC_TEST"] = mark
        return main(words)

    with started(train, timeout=1200) as process:
        for kill in range(KILLS):
            assert wait_for_rows(process, run, 10 * kill + 3), process.output()
            time.sleep(draws.random())
            while not (pids := workers(mark)):
                time.sleep(0.02)
            os.kill(draws.choice(pids), signal.SIGKILL)
            found.append(sizes(process.pid))
        assert process.wait().code == 0, process.output()
    print(f"MiB and files of the trainer at each kill: {found}")
    assert found[-1][0] - found[1][0] < 20
    assert found[-1][1] - found[1][1] < 5
    assert all_gone(mark)
    assert read_rows(run)[-1]["workers/restarts"] == KILLS
    assert final_state(run) == trained([*small, *SOAK]).state

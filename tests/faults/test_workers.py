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
from support.faults import EVERY, Ended, Trained, command, fault, sizes, some, started, words_of
from support.launching import all_gone, marked
from support.ray import needs_ray
from support.runs import final_state, read_rows

from flowgrpo_rc.cli import main

pytestmark = needs_ray


@pytest.fixture
def with_workers(small: list[str], tmp_path: Path) -> Callable[..., Ended]:
    """Runs a training with two workers, and settings besides."""

    def run(*settings: str) -> Ended:
        def environment() -> None:
            os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"

        words = words_of(small, "rollout.workers=2", *settings)
        return command(*words, harm=environment, timeout=300)

    return run


# How workers are lost in step 2, and what is said of it.
LOSSES = some(
    [
        ("kill", "The actor died unexpectedly"),
        ("hang", "took longer than rollout.worker_timeout_s=30"),
        ("weights", "does not hold the trainer's LoRA of step 1"),
        ("settings", "sampled with other settings: guidance_scale"),
        ("raise", "ArithmeticError: a worker's engine has failed"),
    ],
    3,
)


@fault(
    "a rollout worker is killed, hangs, raises or samples something else",
    "another samples its chunk; the bits are equal",
)
@fault("no rollout worker is left", "one line says why, and the same command goes on")
def test_lost_workers(
    with_workers: Callable[..., Ended], small: list[str], tmp_path: Path, whole: Trained
) -> None:
    for harm in (*(f"2_{loss}" for loss, _ in LOSSES), "3_raise"):
        (tmp_path / f"harm_{harm}").touch()
    engine = (
        "rollout.name=support.worker_engines.Harmful",
        f"+rollout.engine_kwargs.folder={tmp_path}",
    )
    ended = with_workers(
        *engine,
        "rollout.workers=1",
        "rollout.worker_timeout_s=30",
        f"rollout.max_restarts={len(LOSSES)}",
    ).expect(1)
    assert not list(tmp_path.glob("harm_*"))
    lost = f"a rollout worker was lost ({len(LOSSES)} of {len(LOSSES)} restarts): "
    said = [line.partition(lost)[2] for line in ended.output.splitlines() if lost in line]
    assert all(any(reason in line for line in said) for _, reason in LOSSES), said
    assert ended.error().startswith("error: no rollout worker is left: ")
    assert "ArithmeticError: a worker's engine has failed" in ended.error()
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1, 2]
    command(*words_of(small, *engine)).expect(0)  # without workers
    assert final_state(tmp_path / "run") == whole.state


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


REFUSED = [
    ("rollout.ray_address=127.0.0.1:1", "rollout.ray_address=127.0.0.1:1 cannot be reached"),
    ("rollout.ray_address=there", "rollout.ray_address=there cannot be reached"),
    (
        "rollout.gpus_per_worker=1",
        "rollout.workers=2: with 1 GPUs each (rollout.gpus_per_worker) they need 2, and of 0 GPUs "
        "here 0 train",
    ),
]


@fault("rollout workers cannot start", "one line says why, before anything is loaded")
@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_workers_are_refused(
    with_workers: Callable[..., Ended], setting: str, message: str
) -> None:
    with_workers(setting).expect(2, f"error: {message}")


@fault("a rollout worker has other packages", "one line says so, before anything is trained")
def test_other_packages(with_workers: Callable[..., Ended]) -> None:
    engine = "rollout.name=support.worker_engines.OtherPackages"
    said = "has other packages than the trainer: torch 0.1 there"
    with_workers(engine, "rollout.workers=1").expect(1, said)


@fault("Ray would listen on a network", "the run is refused")
def test_ray_that_was_imported_before(small: list[str]) -> None:
    def import_ray() -> None:
        importlib.import_module("ray")

    command(*words_of(small, "rollout.workers=1"), harm=import_ray).expect(
        1, "error: rollout.workers: Ray was imported before the run"
    )


def train(words: list[str], mark: str) -> int:
    """Runs a command whose processes are told by a mark; as a terminal does, in a group."""
    # What a fork puts into its environment, only the processes that it starts show.
    os.setpgid(0, 0)
    os.environ["FLOWGRPO_RC_TEST"] = mark
    return main(words)


@fault("the trainer of rollout workers is stopped", "no process of the run is left")
@pytest.mark.parametrize(
    ("number", "to_all"),
    some(
        [
            (signal.SIGINT, True),
            (signal.SIGTERM, False),
            (signal.SIGHUP, True),
            (signal.SIGUSR1, True),
        ]
    ),
)
def test_no_process_is_left(
    small: list[str],
    tmp_path: Path,
    whole: Trained,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    to_all: bool,
) -> None:
    """A terminal and Slurm send a signal to all processes of a group."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = words_of(small, "rollout.workers=1")
    mark = f"run_of_{tmp_path.name}_{number}"
    run = tmp_path / "run"
    with started(lambda: train(words, mark), timeout=300) as process:
        assert process.wait_until((run / "checkpoints" / "step_1").exists), process.output()
        assert marked(mark)
        assert listening(marked(mark)) == {"127.0.0.1"}
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send(number)
        process.wait().expect(75)
    assert all_gone(mark)
    assert not (tmp_path / ".ray").exists()  # where Ray keeps a token for every cluster
    command(*words_of(small)).expect(0)  # without workers
    assert final_state(run) == whole.state


KILLS = 20 if EVERY == 1 else 3  # one every ten steps
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
@fault("the trainer of rollout workers is killed", "no process of the run is left")
def test_soak(
    small: list[str], tmp_path: Path, trained: Callable[[Sequence[str]], Trained]
) -> None:
    run = tmp_path / "run"
    words = words_of(small, *SOAK, "rollout.workers=2", f"rollout.max_restarts={KILLS}")
    mark = f"soak_of_{tmp_path.name}"
    draws = random.Random("soak")
    found = []
    with started(lambda: train(words, mark), timeout=1200) as process:
        for kill in range(KILLS):
            assert process.wait_for_rows(run, 10 * kill + 3), process.output()
            time.sleep(draws.random())
            while not (pids := workers(mark)):
                time.sleep(0.02)
            os.kill(draws.choice(pids), signal.SIGKILL)
            found.append(sizes(process.pid))
        assert process.wait_for_rows(run, 10 * KILLS - 1), process.output()
    print(f"MiB and files of the trainer at each kill: {found}")
    assert found[-1][0] - found[1][0] < 20
    assert found[-1][1] - found[1][1] < 5
    assert read_rows(run)[-1]["workers/restarts"] == KILLS
    assert all_gone(mark)
    command(*words_of(small, *SOAK)).expect(0)  # without workers
    assert final_state(run) == trained([*small, *SOAK]).state

"""Which GPUs workers get, when Ray may be asked, and how workers of one machine load in turn."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.launching import run_alone
from support.ray import needs_ray

from flowgrpo_rc.rollout.engine import EngineError, RolloutChunk, RolloutEngine
from flowgrpo_rc.workers import cluster
from flowgrpo_rc.workers.cluster import PoolSettings, check_reachable, spare_gpus

POOL = {"num_cpus": 1, "num_gpus": 0, "timeout_s": 60.0}
POOL |= {"max_restarts": 0, "staleness": 0, "chunk_size": 1}
PROGRAM = """
import os, sys, time
from pathlib import Path
from accelerate import Accelerator
from flowgrpo_rc.distributed import processes as module
from flowgrpo_rc.workers.cluster import PoolSettings, start_workers

folder, takes, at_once = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])


def load():
    module.free_host_gib = lambda: takes * module.peak_memory_gib(module.torch.device("cpu"))
    left = len(list(folder.glob("left_*")))
    come = left + (at_once if left else 1)
    (folder / f"came_{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("came_*"))) < come:
        assert time.monotonic() < deadline, "it loads alone"
    time.sleep(0.5)  # for one that may not come yet
    assert len(list(folder.glob("came_*"))) == come
    (folder / f"left_{os.getpid()}").touch()


settings = PoolSettings(num_workers=3, in_turn=True, **POOL)
engine = start_workers(load, settings, module.Processes(Accelerator(cpu=True)), address=None)
deadline = time.monotonic() + 120
while len(list(folder.glob("left_*"))) < 3:
    assert time.monotonic() < deadline, "a worker has not loaded"
    time.sleep(0.02)
engine.close()
"""


@needs_ray
@pytest.mark.parametrize(("takes", "at_once"), [("0.5", "1"), ("2.5", "2")])
def test_as_many_workers_load_at_once_as_fit(tmp_path: Path, takes: str, at_once: str) -> None:
    """The first alone; `takes` is how many of its size the free memory holds then."""
    program = tmp_path / "program.py"
    program.write_text(f"POOL = {POOL}{PROGRAM}")
    run_alone(str(program), str(tmp_path), takes, at_once)


@pytest.mark.parametrize(
    ("visible", "device", "trainers", "workers", "share", "expected"),
    [
        ("0,1,2,3", "cuda", 2, 2, 1, "2,3"),
        ("4,7,GPU-a", "cuda", 1, 4, 0.5, "7,GPU-a"),
        ("0,1,2", "cuda", 1, 1, 2, "1,2"),
        ("0", "cpu", 1, 1, 1, "0"),
        ("0", "cuda", 1, 9, 0, None),
        ("", "cpu", 1, 2, 0, None),
        ("0,1", "cuda", 1, 2, 1, "need 2, and of 2 GPUs here 1 train"),
        ("0", "cpu", 1, 2, 1, "need 2, and of 1 GPUs here 0 train"),
        ("0,1,2", "cuda", 1, 3, 0.6, "need 3, and of 3 GPUs here 1 train"),
    ],
)
def test_workers_get_the_gpus_that_no_trainer_uses(
    monkeypatch, visible, device, trainers, workers, share, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = torch.device(device), trainers, workers, share
    if expected and "need" in expected:
        with pytest.raises(ValueError, match=expected):
            spare_gpus(*given)
    else:
        assert spare_gpus(*given) == expected


def test_an_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens there and does not answer is left to Ray."""
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
    check_reachable("auto")
    with pytest.raises(ValueError, match=r"rollout\.ray_address=there cannot be reached"):
        check_reachable("there")
    with pytest.raises(ValueError, match=r"rollout\.ray_address=127\.0\.0\.1:99999 cannot be"):
        check_reachable("127.0.0.1:99999")


@dataclass
class Request:
    only: range | None = None


@needs_ray
def test_a_worker_fetches_a_version_of_the_lora_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowgrpo_rc.workers import worker as module

    fetched, taken = [], []

    class Engine(RolloutEngine[Any]):
        def generate(self, request: Any) -> Iterator[RolloutChunk]:
            return iter(())

        def take_weights(self, state: Mapping[str, torch.Tensor]) -> None:
            taken.append((self.version, state["lora"].item()))

        def held_weights(self) -> None:
            """Shows none."""

        def close(self) -> None:
            """Holds nothing."""

    def get(reference: int) -> bytes:
        fetched.append(reference)
        return save({"lora": torch.tensor(10.0 * reference)})

    monkeypatch.setattr(module.ray, "get", get)
    worker = module.Worker(torch.get_num_threads())
    worker.load(Engine)
    for version in (1, 1, 2, 2, 2):
        with pytest.raises(EngineError, match="asked for one chunk of 1 samples and gave 0"):
            worker.sample(Request(), range(1), version, [version])
    assert (fetched, taken) == ([1, 2], [(1, 10.0), (2, 20.0)])


@needs_ray
def test_chunks_are_sampled_in_the_order_in_which_they_were_asked_for() -> None:
    """Also when a worker becomes free just as a later one asks."""
    from flowgrpo_rc.workers.pool import WorkerPool

    settings = PoolSettings(num_workers=1, in_turn=False, **POOL)

    async def served() -> list[str]:
        pool = WorkerPool([None], settings, {})
        order: list[str] = []

        async def ask(name: str) -> None:
            await pool._next()
            order.append(name)

        first = asyncio.create_task(ask("first"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(ask("second"))
        await asyncio.sleep(0)  # the second is about to look into the queue
        pool._free.put_nowait("worker")
        await asyncio.sleep(0.05)
        pool._free.put_nowait("worker")
        await asyncio.gather(first, second)
        return order

    assert asyncio.run(served()) == ["first", "second"]

"""Starts the workers of a run, before Ray is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.workers.cluster import PoolSettings, join, spare_gpus, start_or_join


def start_workers(
    make_engine: Callable[[], RolloutEngine[Any]],
    settings: PoolSettings,
    processes: Processes,
    *,
    address: str | None,
) -> RolloutEngine[Any]:
    """Starts workers that all processes of a run share; each process calls this.

    They join the Ray cluster at `address`, or start one on this machine if that is None.

    Raises:
      EngineError: the cluster cannot be reached, or no worker starts.
      ValueError: the workers ask for more GPUs than the trainer leaves.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes.count))
    if address is None and here < processes.count:
        raise ValueError(
            f"rollout.workers={settings.num_workers}: the trainer's processes are on several "
            "machines. Start a Ray cluster, and give its rollout.ray_address"
        )
    cluster = None
    if processes.is_main:
        workers, gpus = settings.num_workers, None
        if address is None:
            gpus = spare_gpus(processes.device, here, workers, settings.num_gpus)
        cluster = start_or_join(address, workers * settings.num_cpus, gpus)
    cluster = processes.from_main(cluster)
    if not processes.is_main:
        assert cluster is not None
        join(cluster)
    # From here on Ray may be imported: it has been told where to listen.
    import ray

    from flowgrpo_rc.workers.engine import WorkersEngine

    try:
        if not processes.is_main:
            processes.wait()  # for the pool
            return WorkersEngine(None, settings, processes.device)
        engine = WorkersEngine(make_engine, settings, processes.device)
        processes.wait()
        return engine
    except Exception:
        ray.shutdown()
        raise

"""The workers as the trainer sees them: one engine, on other cores, cards or machines."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.records.packed_batch import PackedBatch, unpack
from flowgrpo_rc.rollout.engine import (
    EngineError,
    RolloutChunk,
    RolloutEngine,
    RolloutRequest,
)
from flowgrpo_rc.workers.arrays import to_arrays, to_tensors
from flowgrpo_rc.workers.pool import PoolSettings, PoolStatus, WorkerPool
from flowgrpo_rc.workers.worker import SampledChunk, package_versions

logger = logging.getLogger(__name__)
_POOL = "pool"


class WorkersEngine(RolloutEngine[Any]):
    """Samples with a pool of workers. Chunks have fixed bounds, so any worker gives the same bits.

    A version of the LoRA is put into the object store once. A chunk is sampled entirely by one
    version.
    """

    kind = ""

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine[Any]] | None,
        settings: PoolSettings,
        *,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        """Starts the pool, or joins that of the first process.

        Args:
          make_engine: makes an engine in a worker; None in all processes but the first.
          settings: how many workers there are, and how long to wait for them.
          chunk_size: samples of a chunk.
          device: where batches are wanted.

        Raises:
          EngineError: no worker starts.
        """
        self._settings = settings
        self._chunk_size = chunk_size
        self._device = device
        self._version = 0
        self._asked = time.monotonic()
        self._owns = make_engine is not None
        if make_engine is not None:
            remote: Any = ray.remote(WorkerPool)
            options = {"name": _POOL, "num_cpus": 0, "max_concurrency": 10_000}
            self._pool = remote.options(**options).remote(make_engine, settings, package_versions())
            with _told():
                ray.get(self._pool.start.remote())
        else:
            self._pool = ray.get_actor(_POOL)

    def generate(self, request: RolloutRequest) -> Iterator[RolloutChunk]:
        """Yields the chunks in their order; all are handed to the workers at once."""
        boxed = [ray.put(request)]
        asked = [
            (rows, self._pool.sample.remote(boxed, rows, self._version))
            for rows in request.chunks(self._chunk_size)
        ]
        encoded: dict[str, Tensor] = {}
        for rows, reference in asked:
            with _told():
                (found,) = ray.get(reference)
                sampled: SampledChunk = ray.get(found)
            tensors = to_tensors(sampled.arrays, self._device)
            if rows.start == 0:
                encoded = {name: value for name, value in tensors.items() if "." in name}
            batch = unpack(PackedBatch(sampled.header, encoded | tensors))
            yield self._chunk(request, rows, batch, sampled)

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Puts a version of the LoRA into the object store; chunks asked for later get it."""
        self._version = version
        if self._owns:
            adapter = [ray.put(to_arrays(state))]
            ray.get(self._pool.put_adapter.remote(version, adapter))

    def held_weights(self) -> None:
        """Returns None: each worker compares what it holds after every chunk."""

    def take_metrics(self) -> MetricBag:
        """Returns how busy the workers were; the process that owns them says who was lost."""
        metrics = MetricBag()
        status = PoolStatus()
        if self._owns:
            status = ray.get(self._pool.status.remote())
        for reason in status.lost:
            logger.warning(
                "a rollout worker was lost (%d of %d restarts): %s",
                *(status.restarts, self._settings.max_restarts, reason),
            )
        seconds = time.monotonic() - self._asked
        self._asked = time.monotonic()
        busy = status.busy_s / (seconds * self._settings.num_workers)
        metrics.max("workers/busy_fraction", torch.tensor(busy))
        metrics.max("workers/longest_queue", torch.tensor(float(status.longest_queue)))
        metrics.max("workers/mib_received", torch.tensor(status.num_bytes / 2**20))
        metrics.max("workers/restarts", torch.tensor(float(status.restarts)))
        return metrics

    def close(self) -> None:
        """Ends the workers and the connection, and a cluster that was started for the run."""
        if ray.is_initialized():
            if self._owns:
                with contextlib.suppress(ValueError):
                    ray.kill(self._pool)
            ray.shutdown()

    def _chunk(
        self, request: RolloutRequest, rows: range, batch: Any, sampled: SampledChunk
    ) -> RolloutChunk:
        latents = None
        if sampled.latents is not None:
            latents = to_tensors({"latents": sampled.latents}, self._device)["latents"]
        samples = sampled.samples
        return RolloutChunk(
            batch=batch,
            # Shared memory is read-only; rewards are foreign code.
            samples=samples.copy() if isinstance(samples, np.ndarray) else samples,
            prompts=[request.prompt_of(row) for row in rows],
            policy_version=self._version,
            latents=latents,
        )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns what Ray raises for a task into the error of the task."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, EngineError) else error
        raise EngineError(str(cause)) from error

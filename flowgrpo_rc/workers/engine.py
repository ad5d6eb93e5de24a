"""The workers as the trainer sees them: one engine, on other cores, cards or machines."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.records.packed_batch import PackedBatch, unpack
from flowgrpo_rc.rollout.engine import EngineError, RolloutChunk, RolloutEngine, RolloutRequest
from flowgrpo_rc.workers.cluster import PoolSettings
from flowgrpo_rc.workers.pool import STATUS, WorkerPool
from flowgrpo_rc.workers.worker import (
    LATENTS,
    Handle,
    Reference,
    SampledChunk,
    package_versions,
    to_bytes,
)

logger = logging.getLogger(__name__)
_POOL = "pool"


class WorkersEngine(RolloutEngine[Any]):
    """Samples with a pool. Chunks have fixed bounds, so any worker gives the same bits."""

    kind = ""
    elsewhere = True

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine[Any]] | None,
        settings: PoolSettings,
        device: torch.device,
    ) -> None:
        """Starts the pool, or joins that of another process if `make_engine` is None."""
        self._settings = settings
        self._device = device
        self._owns = make_engine is not None
        self._pool = (
            ray.get_actor(_POOL) if make_engine is None else _started(make_engine, settings)
        )

    def generate(self, request: RolloutRequest) -> Iterator[RolloutChunk]:
        """Hands all chunks to the workers at once; yields them in their order."""
        boxed = [ray.put(request)]
        pending = [
            (rows, self._pool.sample.remote(boxed, rows, self.version))
            for rows in request.chunks(self._settings.chunk_size)
        ]
        return self._chunks(request, boxed, pending, self.version)

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Puts the LoRA into the object store; chunks asked for later get it."""
        if self._owns:
            adapter = [ray.put(to_bytes(state))]
            with _told():
                ray.get(self._pool.put_adapter.remote(self.version, adapter))

    def held_weights(self) -> None:
        """Returns None: each worker compares what it holds after every chunk."""

    def take_metrics(self) -> MetricBag:
        """Returns how busy the workers were; the process that owns them says who was lost."""
        metrics = MetricBag()
        # All processes have the same metrics, and those that own no worker have zeros.
        status = dict.fromkeys(STATUS, 0.0)
        lost: list[str] = []
        if self._owns:
            with _told():
                status, lost = ray.get(self._pool.status.remote())
        for reason in lost:
            logger.warning(
                "a rollout worker was lost (%d of %d restarts): %s",
                *(status["restarts"], self._settings.max_restarts, reason),
            )
        for name, value in status.items():
            metrics.max(f"workers/{name}", torch.tensor(float(value)))
        return metrics

    def cancel(self) -> None:
        """Ends the workers; who waits for a chunk gets an error."""
        if self._owns:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._pool)

    def close(self) -> None:
        """Ends the workers and the connection, and a cluster that was started for the run."""
        if ray.is_initialized():
            self.cancel()
            ray.shutdown()

    def _chunks(
        self,
        request: RolloutRequest,
        boxed: list[Reference],
        pending: list[tuple[range, Reference]],
        version: int,
    ) -> Iterator[RolloutChunk]:
        encoded: dict[str, Tensor] = {}
        first: DiffusionBatch | None = None
        while pending:
            rows, reference = pending.pop(0)  # so that Ray can free it when it has been read
            sampled = self._received(boxed, rows, version, reference)
            tensors = load(sampled.tensors)
            latents = tensors.pop(LATENTS, None)
            if rows.start == 0:
                encoded = {n: t.to(self._device) for n, t in tensors.items() if "." in n}
            batch = unpack(PackedBatch(sampled.header, tensors | encoded), self._device)
            if isinstance(batch, DiffusionBatch):
                # `concat` keeps encoded prompts once if they are one object in all chunks.
                first = first or batch
                batch = batch.replace(conditioning=first.conditioning, negative=first.negative)
            samples = sampled.samples
            yield RolloutChunk(
                batch=batch,
                # Ray's shared memory is read-only; rewards are foreign code.
                samples=samples.copy() if isinstance(samples, np.ndarray) else samples,
                prompts=[request.prompt_of(row) for row in rows],
                latents=None if latents is None else latents.to(self._device),
                blocks=sampled.blocks,
            )

    def _received(
        self, boxed: list[Reference], rows: range, version: int, reference: Reference
    ) -> SampledChunk:
        """Waits for a chunk, and has it sampled again if it is lost with its machine."""
        while True:
            with _told():
                (chunk,) = ray.get(reference)
                try:
                    sampled: SampledChunk = ray.get(chunk)
                    return sampled
                except ObjectLostError:
                    reference = self._pool.sample.remote(boxed, rows, version)


def _started(make_engine: Callable[[], RolloutEngine[Any]], settings: PoolSettings) -> Handle:
    """Starts the pool on this machine, since it is lost with its machine, and its workers."""
    this_node = ray.get_runtime_context().get_node_id()
    on_this_node = NodeAffinitySchedulingStrategy(this_node, soft=False)
    remote: Handle = ray.remote(WorkerPool)
    pool = remote.options(
        name=_POOL, num_cpus=0, max_concurrency=10_000, scheduling_strategy=on_this_node
    ).remote([ray.put(make_engine)], settings, package_versions())
    with _told():
        ray.get(pool.start.remote())
    return pool


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns what Ray raises into an EngineError: the pool's own, or that the pool is lost."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, EngineError) else error
        raise EngineError(str(cause)) from error
    except RayError as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"the pool of rollout workers has ended ({reason}); the same command goes on from the "
            "last checkpoint"
        ) from error

"""Sampling ahead: one thread samples the steps to come with older weights, while this one
trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected, RolloutSource

MOST_DROPPED = 3


class AheadSource(RolloutSource):
    """Step s is always sampled with the weights of step max(0, s - 1 - staleness), never with
    whatever is newest.

    Which weights a sample comes from thus does not depend on who is faster: runs repeat, and
    resume, bit for bit. The thread starts on a step as soon as those weights are handed over, up to
    `staleness` steps ahead of the training. It alone talks to the engine, gives it a copy of the
    LoRA between two steps, and hands finished chunks to the rewards. What it raises, `collect` and
    `sync_weights` raise, with its traceback.

    A batch in which the engine used older weights than that is dropped and sampled again. steps:
    those to sample.
    """

    def __init__(
        self, source: EngineSource, staleness: int, *, steps: range, device: torch.device
    ) -> None:
        self._source, self._staleness, self._steps = source, staleness, steps
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="rollout", initializer=_use, initargs=(device,)
        )
        self._sampled: dict[int, Future[Collected]] = {}
        self._versions: dict[int, dict[str, Tensor]] = {}

    def collect(self, step: int) -> Collected:
        return self._sampled.pop(step).result()

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        for future in self._sampled.values():
            if future.done():
                future.result()
        self._versions = {
            v: kept for v, kept in self._versions.items() if v >= version - self._staleness
        }
        self._versions[version] = copy = {
            name: tensor.detach().clone() for name, tensor in state.items()
        }
        last = version + 1 + self._staleness
        for step in range(1 if version == 0 else last, last + 1):
            if step in self._steps:
                self._sampled[step] = self._executor.submit(self._sample, step, copy, version)

    def older_weights(self) -> dict[int, Mapping[str, Tensor]]:
        newest = max(self._versions)
        return {version: state for version, state in self._versions.items() if version != newest}

    def close(self) -> None:
        self._source.cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def _sample(self, step: int, state: Mapping[str, Tensor], version: int) -> Collected:
        """Runs in the thread."""
        for dropped in range(MOST_DROPPED):
            self._source.sync_weights(state, version)
            collected = self._source.sample(step)
            oldest, newest = collected.versions()
            if newest > version:
                raise RuntimeError(
                    f"the rollout engine sampled step {step} with the weights of step {newest}"
                )
            if oldest == version:
                return collected._replace(dropped=dropped)
        raise RuntimeError(
            f"the rollout engine sampled step {step} with the weights of step {oldest}, "
            f"{MOST_DROPPED} times; "
            f"rollout.staleness={self._staleness} allows those of step {version}"
        )


def _use(device: torch.device) -> None:
    """CUDA's current device is that of a thread, and a new thread's is the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)

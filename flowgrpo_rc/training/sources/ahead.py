"""Sampling ahead: a thread samples the steps to come with older weights while this one trains."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected, RolloutSource

MOST_DROPPED = 3  # batches of a step; then the engine is taken to be broken


class AheadSource(RolloutSource):
    """Samples step s with the weights of step max(0, s - 1 - staleness), never with newer ones.

    So the weights of a sample do not depend on which thread is faster: runs repeat and resume bit
    for bit. The thread starts on a step as soon as its weights are handed over, up to `staleness`
    steps ahead of the training. It alone talks to the engine, gives it a copy of the LoRA between
    two steps, and hands finished chunks to the rewards. `collect` and `sync_weights` raise what the
    thread raised, with its traceback.

    If the engine used older weights for a sample, the batch is dropped and sampled again.
    """

    def __init__(
        self, source: EngineSource, staleness: int, *, steps: range, device: torch.device
    ) -> None:
        """Starts the thread.

        Args:
          source: samples a step with an engine.
          staleness: how many steps the weights may be behind, at least 1.
          steps: the steps to sample.
          device: the device that the engine samples on.
        """
        self._source = source
        self._staleness = staleness
        self._steps = steps
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="rollout", initializer=_use, initargs=(device,)
        )
        self._sampled: dict[int, Future[Collected]] = {}
        self._versions: dict[int, dict[str, Tensor]] = {}

    def collect(self, step: int) -> Collected:
        """Waits for a step of the thread."""
        return self._sampled.pop(step).result()

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copies the LoRA after `version` steps and starts the steps that wait for it."""
        for future in self._sampled.values():
            if future.done():
                future.result()  # raises what the thread raised
        oldest = version - self._staleness
        self._versions = {v: kept for v, kept in self._versions.items() if v >= oldest}
        copy = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._versions[version] = copy
        last = version + 1 + self._staleness
        for step in range(1 if version == 0 else last, last + 1):
            if step in self._steps:
                self._sampled[step] = self._executor.submit(self._sample, step, copy, version)

    def older_weights(self) -> dict[int, Mapping[str, Tensor]]:
        """Returns the weights that steps still to be sampled need, without the newest."""
        newest = max(self._versions)
        return {version: state for version, state in self._versions.items() if version != newest}

    def close(self) -> None:
        """Ends the thread and closes the engine."""
        self._source.cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def _sample(self, step: int, state: Mapping[str, Tensor], version: int) -> Collected:
        """Samples a step; runs in the thread."""
        for dropped in range(MOST_DROPPED):
            self._source.sync_weights(state, version)
            collected = self._source.sample(step)
            oldest, newest = collected.versions()
            if newest > version:
                raise EngineError(
                    f"the rollout engine sampled step {step} with the weights of step {newest}"
                )
            if oldest == version:
                return collected._replace(dropped=dropped)
        raise EngineError(
            f"the rollout engine sampled step {step} with the weights of step {oldest}, "
            f"{MOST_DROPPED} times; rollout.staleness={self._staleness} allows those of step "
            f"{version}"
        )


def _use(device: torch.device) -> None:
    # CUDA's current device belongs to a thread; a new thread starts with the first one.
    if device.type == "cuda":
        torch.cuda.set_device(device)

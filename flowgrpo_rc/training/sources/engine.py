"""Trajectories that an engine samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt, PromptBatch, concat
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.samples import Shown, thumbnail
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import RolloutChunk, RolloutEngine
from flowgrpo_rc.training.evaluation import collect_rewards
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.tasks.task import Task


class EngineSource(RolloutSource):
    """Samples with an engine; finished chunks go to the reward threads while the rest is
    sampled.
    """

    def __init__(
        self,
        engine: RolloutEngine[Any],
        task: Task,
        sampler: PromptSampler,
        rewards: RewardManager,
        processes: Processes,
        config: RolloutConfig,
        *,
        mini_batch_size: int,
        seed: int,
    ) -> None:
        self.engine = engine
        self._task, self._sampler, self._rewards, self._processes = (
            task,
            sampler,
            rewards,
            processes,
        )
        self._n, self._mini_batch_size, self._seed = config.n, mini_batch_size, seed
        self._cancelled = threading.Event()
        self._pushed: tuple[Mapping[str, Tensor], int] | None = None

    def collect(self, step: int) -> Collected:
        collected = self.sample(step)
        for version in collected.versions():
            if version != step - 1:
                raise RuntimeError(
                    f"the rollout engine sampled step {step} with the weights of step {version}"
                )
        return collected

    def sample(self, step: int) -> Collected:
        """The trajectories of a step by whatever weights the engine has. CancelledError after
        `cancel`.
        """
        prompts = self.prompts(step)
        request = self._task.request(prompts, self._seeds(prompts))
        batches, handles = [], []
        prompted: list[Prompt] = []
        shown: list[np.ndarray | str | None] = []
        for chunk in self.engine.generate(request):
            if self._cancelled.is_set():
                raise CancelledError
            self._task.check_rollout(chunk.batch)
            different = request.spec.differences(chunk.batch.spec)
            if different:
                raise RuntimeError(
                    f"the rollout engine sampled with other settings: {'; '.join(different)}"
                )
            batches.append(chunk.batch)
            handles.append(self._rewards.submit(chunk.samples, chunk.prompts, chunk.latents))
            prompted += chunk.prompts
            shown += thumbnails(chunk)
        rewards = partial(collect_rewards, self._rewards, handles, self._processes)
        collected = Collected(concat(batches), rewards, shown=Shown(prompted, shown))
        self._check_weights(collected)
        return collected

    def prompts(self, step: int) -> PromptBatch:
        """This process's share of the step's prompts."""
        return shard(
            self._sampler.step(step - 1),
            step=step,
            mini_batch_size=self._mini_batch_size,
            rank=self._processes.rank,
            world_size=self._processes.count,
        )

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        self._pushed = state, version
        self.engine.sync_weights(state, version)

    def older_weights(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {}

    def cancel(self) -> None:
        """Let a `sample` in another thread end at its next chunk."""
        self._cancelled.set()

    def close(self) -> None:
        self.engine.close()

    def _check_weights(self, collected: Collected) -> None:
        """RuntimeError if the engine names the version that was pushed last and holds another LoRA,
        rounding aside.
        """
        held = self.engine.held_weights()
        if held is None or self._pushed is None or self._pushed[1] not in collected.versions():
            return
        state, version = self._pushed
        number = other_tensors(held, state)
        if number:
            raise RuntimeError(
                f"the rollout engine does not hold the trainer's LoRA of step {version}: {number} "
                f"of {len(held)} "
                "tensors are others"
            )

    def _seeds(self, prompts: PromptBatch) -> list[int]:
        slots, samples = prompts.slots, range(self._n)
        return [
            derive_seed(self._seed, prompts.step, slot, index, "rollout")
            for slot in slots
            for index in samples
        ]


def thumbnails(chunk: RolloutChunk) -> list[np.ndarray | str | None]:
    """Of each sample of a chunk, as `Shown` has them."""
    if chunk.samples is None:
        return [None] * len(chunk.prompts)
    return [sample if isinstance(sample, str) else thumbnail(sample) for sample in chunk.samples]


def other_tensors(held: Mapping[str, Tensor], pushed: Mapping[str, Tensor]) -> int:
    """How many LoRA tensors that an engine holds are not those that it was given, rounding to its
    precision aside.
    """
    return int(
        torch.stack(
            [(tensor != pushed[name].to(tensor)).any() for name, tensor in held.items()]
        ).sum()
    )

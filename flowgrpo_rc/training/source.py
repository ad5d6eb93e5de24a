"""Where the trajectories of a step come from: an engine that samples them, or files that another run saved."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, Prompt, PromptBatch, Rewards, concat
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.base import RolloutChunk, RolloutConfig, RolloutEngine
from flowgrpo_rc.training.evaluation import collect_rewards
from flowgrpo_rc.training.processes import Processes
from flowgrpo_rc.training.rollout_files import load_rollout, read_header, rollout_path
from flowgrpo_rc.training.samples import Shown, thumbnail
from flowgrpo_rc.training.task import Task


class Collected(NamedTuple):
    """This process's part of a step; `rewards()` waits until they are known. dropped: batches that were too old."""

    batch: Batch
    rewards: Callable[[], Rewards]
    dropped: int = 0
    shown: Shown = Shown()

    def versions(self) -> tuple[int, int]:
        """The oldest and the newest weights that a sample was made with."""
        oldest, newest = torch.stack(self.batch.policy_version.aminmax()).tolist()
        return oldest, newest


class RolloutSource(ABC):
    """Steps count from 1."""

    @abstractmethod
    def collect(self, step: int) -> Collected:
        """The trajectories of a step."""

    @abstractmethod
    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """The trainer's LoRA after `version` steps."""

    @abstractmethod
    def older_weights(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The trainer's LoRA after earlier steps, by step, that rollouts still to come depend on."""

    @abstractmethod
    def close(self) -> None:
        """Free what the source holds."""


class EngineSource(RolloutSource):
    """Samples with an engine; finished chunks go to the reward threads while the rest is sampled."""

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
        self._task, self._sampler, self._rewards, self._processes = task, sampler, rewards, processes
        self._n, self._mini_batch_size, self._seed = config.n, mini_batch_size, seed
        self._cancelled = threading.Event()
        self._pushed: tuple[Mapping[str, Tensor], int] | None = None

    def collect(self, step: int) -> Collected:
        collected = self.sample(step)
        for version in collected.versions():
            if version != step - 1:
                raise RuntimeError(f"the rollout engine sampled step {step} with the weights of step {version}")
        return collected

    def sample(self, step: int) -> Collected:
        """The trajectories of a step by whatever weights the engine has. CancelledError after `cancel`."""
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
                raise RuntimeError(f"the rollout engine sampled with other settings: {'; '.join(different)}")
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
        """RuntimeError if the engine names the version that was pushed last and holds another LoRA, rounding aside."""
        held = self.engine.held_weights()
        if held is None or self._pushed is None or self._pushed[1] not in collected.versions():
            return
        state, version = self._pushed
        number = other_tensors(held, state)
        if number:
            raise RuntimeError(
                f"the rollout engine does not hold the trainer's LoRA of step {version}: {number} of {len(held)} "
                "tensors are others"
            )

    def _seeds(self, prompts: PromptBatch) -> list[int]:
        slots, samples = prompts.slots, range(self._n)
        return [derive_seed(self._seed, prompts.step, slot, index, "rollout") for slot in slots for index in samples]


def thumbnails(chunk: RolloutChunk) -> list[np.ndarray | str | None]:
    """Of each sample of a chunk, as `Shown` has them."""
    if chunk.samples is None:
        return [None] * len(chunk.prompts)
    return [sample if isinstance(sample, str) else thumbnail(sample) for sample in chunk.samples]


def other_tensors(held: Mapping[str, Tensor], pushed: Mapping[str, Tensor]) -> int:
    """How many LoRA tensors that an engine holds are not those that it was given, rounding to its precision aside."""
    return int(torch.stack([(tensor != pushed[name].to(tensor)).any() for name, tensor in held.items()]).sum())


class ReplaySource(RolloutSource):
    """Trajectories that another run saved, with the log-probs of the policy that sampled them; over and over.

    terms: the rewards that must be known one by one. Raises ValueError, before anything is trained, where the folder
    lacks steps, a file is damaged, they come from another number of processes, lack one of the terms, or were sampled
    otherwise than the configuration says (their precision aside).
    """

    def __init__(
        self,
        folder: Path,
        task: Task,
        processes: Processes,
        config: RolloutConfig,
        *,
        samples: int,
        terms: Collection[str] = (),
    ) -> None:
        self._terms = terms
        self._task, self._processes = task, processes
        self._paths = replay_files(folder, processes.rank, processes.count)
        self._samples, self._n = samples, config.n
        wanted = task.request(PromptBatch(step=1, prompts=[], slots=[]), []).spec
        for path in self._paths:
            there, here = read_header(path), dataclasses.asdict(wanted) | task.origin()
            found = there["spec"] | there["origin"] | {"dtype": wanted.dtype}
            different = [f"{k}: {found.get(k)!r} there, {here[k]!r} here" for k in here if found.get(k) != here[k]]
            if different:
                raise ValueError(f"data.replay_dir: {path} was sampled with other settings ({'; '.join(different)})")
        self._read(self._paths[0])

    def collect(self, step: int) -> Collected:
        batch, rewards = self._read(self._paths[(step - 1) % len(self._paths)])
        return Collected(batch, lambda: rewards)

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Nobody samples."""

    def older_weights(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, path: Path) -> tuple[Batch, Rewards]:
        batch, rewards, _ = load_rollout(path, self._processes.device)
        self._task.check_rollout(batch)
        lacking = sorted(set(self._terms) - set(rewards.parts))
        if lacking:
            raise ValueError(
                f"data.replay_dir: {path} has no reward {lacking[0]!r}, and algorithm.adv_estimator=gdpo needs each of "
                f"reward.terms; it has {', '.join(rewards.parts)}"
            )
        sizes = set(batch.group.unique(return_counts=True)[1].tolist())
        if len(batch) != self._samples or sizes != {self._n}:
            raise ValueError(
                f"data.replay_dir: {path} has {len(batch)} samples in groups of {sorted(sizes)}; data.train_batch_size "
                f"and rollout.n ask for {self._samples} in groups of {self._n}"
            )
        return batch, rewards


def replay_files(folder: Path, rank: int, count: int) -> list[Path]:
    """The saved steps of a process, in order; all processes must have all of them. `folder` is a run's, or its
    rollouts/."""
    inside = folder / "rollouts"
    folder = inside if inside.is_dir() else folder
    found = {path.name for path in folder.glob("step_*_process_*_of_*.safetensors")}
    if not found:
        name = rollout_path(folder, 1, rank, count).name
        raise ValueError(f"data.replay_dir={folder} has no file such as {name}: save some with trainer.save_rollouts")
    last = max(int(name.split("_")[1]) for name in found)
    wanted = {rollout_path(folder, step, r, count).name for step in range(1, last + 1) for r in range(count)}
    if found != wanted:
        first = min(found ^ wanted)
        raise ValueError(
            f"data.replay_dir={folder} must hold steps 1 to {last} of {count} process(es), as many as train now, and "
            f"nothing else; {first} is {'missing' if first in wanted else 'of another number of processes'}"
        )
    return [rollout_path(folder, step, rank, count) for step in range(1, last + 1)]

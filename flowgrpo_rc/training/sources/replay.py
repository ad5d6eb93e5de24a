"""Trajectories that another run saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowgrpo_rc.batch import Batch, PromptBatch, Rewards, Spec
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.rollout_files import load_rollout, read_header, rollout_path
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.tasks.task import Task


class ReplaySource(RolloutSource):
    """Trajectories that another run saved, with the log-probs of the policy that sampled them; over
    and over.

    terms: the rewards that must be known one by one. Raises ValueError, before anything is trained,
    where the folder lacks steps, a file is damaged, they come from another number of processes,
    lack one of the terms, or were sampled otherwise than the configuration says (their precision
    aside).
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
        check_headers(self._paths, wanted, task.origin())
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
                f"data.replay_dir: {path} has no reward {lacking[0]!r}, and "
                "algorithm.adv_estimator=gdpo needs each of "
                f"reward.terms; it has {', '.join(rewards.parts)}"
            )
        sizes = set(batch.group.unique(return_counts=True)[1].tolist())
        if len(batch) != self._samples or sizes != {self._n}:
            raise ValueError(
                f"data.replay_dir: {path} has {len(batch)} samples in groups of {sorted(sizes)}; "
                "data.train_batch_size "
                f"and rollout.n ask for {self._samples} in groups of {self._n}"
            )
        return batch, rewards


def check_headers(paths: Sequence[Path], spec: Spec, origin: Mapping[str, Any]) -> None:
    """Raises ValueError for a file that was sampled with other settings, their precision aside.

    Args:
      paths: saved rollouts; their tensors are not read.
      spec: how samples have to be made.
      origin: what else has to agree, `Task.origin`; entries that are not known may be left out.
    """
    here = dataclasses.asdict(spec) | dict(origin)
    for path in paths:
        there = read_header(path)
        found = there["spec"] | there["origin"] | {"dtype": spec.dtype}
        different = [
            f"{key}: {found.get(key)!r} there, {here[key]!r} here"
            for key in here
            if found.get(key) != here[key]
        ]
        if different:
            raise ValueError(
                f"data.replay_dir: {path} was sampled with other settings ({'; '.join(different)})"
            )


def replay_files(folder: Path, rank: int, count: int) -> list[Path]:
    """The saved steps of a process, in order; all processes must have all of them. `folder` is a
    run's, or its rollouts/."""
    inside = folder / "rollouts"
    folder = inside if inside.is_dir() else folder
    found = {path.name for path in folder.glob("step_*_process_*_of_*.safetensors")}
    if not found:
        name = rollout_path(folder, 1, rank, count).name
        raise ValueError(
            f"data.replay_dir={folder} has no file such as {name}: save some with "
            "trainer.save_rollouts"
        )
    last = max(int(name.split("_")[1]) for name in found)
    wanted = {
        rollout_path(folder, step, r, count).name
        for step in range(1, last + 1)
        for r in range(count)
    }
    if found != wanted:
        first = min(found ^ wanted)
        raise ValueError(
            f"data.replay_dir={folder} must hold steps 1 to {last} of {count} process(es), as "
            "many as train now, and "
            f"nothing else; {first} is "
            f"{'missing' if first in wanted else 'of another number of processes'}"
        )
    return [rollout_path(folder, step, rank, count) for step in range(1, last + 1)]

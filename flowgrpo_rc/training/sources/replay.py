"""Trajectories that another run saved."""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from flowgrpo_rc.batch import Batch, PromptBatch, Rewards
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.rollout_files import (
    check_contents,
    check_headers,
    load_rollout,
    replay_files,
)
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.tasks.task import Task


class ReplaySource(RolloutSource):
    """Repeats trajectories that another run saved, with the log-probs of their own policy."""

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
        """Checks the files of a run (or its rollouts/). ValueError if they do not fit this one."""
        self._terms = terms
        self._task = task
        self._processes = processes
        self._paths = replay_files(folder, processes.rank, processes.count)
        self._samples = samples
        self._n = config.n
        wanted = task.request(PromptBatch(step=1, prompts=[], slots=[]), []).spec
        check_headers(self._paths, wanted, task.origin())
        self._read(self._paths[0])

    def collect(self, step: int) -> Collected:
        """Reads the next saved step; after the last one comes the first."""
        batch, rewards = self._read(self._paths[(step - 1) % len(self._paths)])
        return Collected(batch, lambda: rewards)

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Does nothing: nobody samples."""

    def close(self) -> None:
        """Does nothing: no resource is held."""

    def _read(self, path: Path) -> tuple[Batch, Rewards]:
        batch, rewards, _ = load_rollout(path, self._processes.device)
        self._task.check_rollout(batch)
        check_contents(
            path, batch, rewards, samples=self._samples, group_size=self._n, terms=self._terms
        )
        return batch, rewards

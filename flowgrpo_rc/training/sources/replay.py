"""Trajectories that another run saved."""

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

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


@dataclass(eq=False, repr=False)
class ReplaySource(RolloutSource):
    """Repeats trajectories that another run saved, with the log-probs of their own policy."""

    folder: Path
    task: Task
    processes: Processes
    config: RolloutConfig
    _: KW_ONLY
    samples: int
    terms: Collection[str]

    def __post_init__(self) -> None:
        """Checks the files of a run (or its rollouts/). ValueError if they do not fit this one."""
        self._paths = replay_files(self.folder, self.processes.rank, self.processes.count)
        wanted = self.task.request(PromptBatch(step=1, prompts=[], slots=[]), []).spec
        check_headers(self._paths, wanted, self.task.origin())
        self._read(self._paths[0])

    def collect(self, step: int) -> Collected:
        """Reads the next saved step; after the last one comes the first."""
        batch, rewards = self._read(self._paths[(step - 1) % len(self._paths)])
        return Collected(batch, lambda: rewards)

    def close(self) -> None:
        """Does nothing: no resource is held."""

    def _read(self, path: Path) -> tuple[Batch, Rewards]:
        batch, rewards, _ = load_rollout(path, self.processes.device)
        self.task.check_rollout(batch)
        check_contents(
            path, batch, rewards, samples=self.samples, group_size=self.config.n, terms=self.terms
        )
        return batch, rewards

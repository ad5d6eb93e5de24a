"""Where the trajectories of a step come from: an engine that samples them, or files that another
run saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.records.samples import Shown


class Collected(NamedTuple):
    """This process's part of a step; `rewards()` waits until they are known. dropped: batches that
    were too old.
    """

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
        """The trainer's LoRA after earlier steps, by step, that rollouts still to come depend
        on.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the source holds."""

"""Where the trajectories of a step come from: an engine, or files that another run saved."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.records.samples import Shown
from flowgrpo_rc.rollout.engine import EngineError, RolloutEngine

Engine = RolloutEngine[Any]  # of any kind of request


class Collected(NamedTuple):
    """This process's part of a step; `rewards` waits until they are known, and returns them."""

    batch: Batch
    rewards: Callable[..., Rewards]  # may take the `earlier` ones of `collect_rewards`
    shown: Shown = Shown()
    metrics: MetricBag | None = None
    # Waits for the rewards of so many first samples alone; None if they come all at once.
    first: Callable[[int], Rewards] | None = None
    teaches: bool = True  # False if no group of any process does: then there is no update
    advantages: Tensor | None = None  # [B]; None: they follow from the rewards

    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version of the weights that made a sample."""
        oldest, newest = torch.stack(self.batch.policy_version.aminmax()).tolist()
        return oldest, newest

    def check_versions(self, step: int, staleness: int = 0) -> None:
        """Raises EngineError unless all samples of a step are of the weights that it asks for."""
        expected = sampled_version(step, staleness)
        for version in self.versions():
            if version != expected:
                raise EngineError(
                    f"the rollout engine sampled step {step} with the weights of step {version}; "
                    f"rollout.{staleness=} asks for those of step {expected}"
                )

    def staleness(self, step: int) -> MetricBag:
        """Measures how many steps the weights of each sample were behind, and which they were."""
        version = self.batch.policy_version
        behind = step - 1 - version  # fresh weights have the version step - 1
        metrics = MetricBag()
        metrics.mean("rollout/staleness_mean", behind)
        metrics.max("rollout/staleness_max", behind)
        metrics.min("rollout/policy_version_min", version)
        metrics.max("rollout/policy_version_max", version)
        return metrics


def sampled_version(step: int, staleness: int) -> int:
    """Returns the step whose weights sample `step`, with weights `staleness` steps behind."""
    return max(0, step - 1 - staleness)


class RolloutSource(ABC):
    """Gives the trainer its trajectories. Steps count from 1."""

    @abstractmethod
    def collect(self, step: int) -> Collected:
        """Returns the trajectories of a step."""

    def engines(self) -> Sequence[Engine]:
        """Returns the engines that sample; none for trajectories from files."""
        return ()

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Gives all engines the trainer's LoRA after `version` steps, tensors by name."""
        for engine in self.engines():
            engine.sync_weights(state, version)

    def older_weights(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Returns earlier versions of the LoRA that rollouts to come need; none as a rule."""
        return {}

    def state(self) -> dict[str, object]:
        """Returns what a checkpoint holds of it; JSON can hold that. Nothing as a rule."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state` has returned; by default that is nothing."""
        assert not state, state

    @abstractmethod
    def close(self) -> None:
        """Frees what the source holds."""

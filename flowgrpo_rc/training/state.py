"""The state of a run: what its checkpoints hold, and how it goes back to one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowgrpo_rc.algorithms.algorithm import Algorithm
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.records.checkpoint import (
    OLDER,
    Checkpoint,
    CheckpointError,
    check_tensors,
    save_checkpoint,
)
from flowgrpo_rc.training.sources.source import RolloutSource
from flowgrpo_rc.training.update import PolicyUpdate


@dataclass(frozen=True, eq=False)
class RunState:
    """Saves and loads the parts of a run that change; `keep` checkpoints stay in `folder`."""

    folder: Path
    keep: int
    processes: Processes
    update: PolicyUpdate
    algorithm: Algorithm[Any]
    health: HealthMonitor
    source: RolloutSource

    def sync(self, step: int) -> None:
        """Gives the engine the weights to sample with after a step."""
        weights = self.algorithm.sampling_weights(self.update.lora_state())
        self.source.sync_weights(weights, step)

    def save(self, step: int, *, spare: int | None) -> None:
        """Writes the checkpoint of a step, on the main process; that of `spare` stays."""
        if self.processes.is_main:
            state = {
                "update": self.update.state(),
                "health": self.health.state_dict(),
                "source": self.source.state(),
            }
            older = self.source.older_weights()
            tensors: dict[str, Mapping[str, Tensor]] = {
                **self.update.tensors(),
                **{f"{OLDER}{version}": weights for version, weights in older.items()},
                **self.algorithm.tensors(),
            }
            checkpoint = Checkpoint(step=step, tensors=tensors, state=state)
            save_checkpoint(self.folder, checkpoint, keep=self.keep, spare=spare)
        self.processes.wait()

    def load(self, resumed: Checkpoint) -> None:
        """Goes back to a checkpoint. Raises CheckpointError if it is of another run."""
        try:
            self.update.load(resumed.tensors, resumed.state["update"])
            self.health.load_state_dict(resumed.state["health"])
            self.algorithm.load(resumed.tensors)
            self._check_names(resumed)
            self.source.load(resumed.state["source"])
            lora = self.update.lora_state()
            for version, weights in sorted(resumed.older_weights().items()):
                older = check_tensors(f"{OLDER}{version}", weights, lora)
                self.source.sync_weights(older, version)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {resumed.step} in {self.folder.parent} is not one that "
                f"this run has written: {type(error).__name__}: {error}"
            ) from error

    def _check_names(self, resumed: Checkpoint) -> None:
        """Raises ValueError for a part of a checkpoint that this version does not know."""
        known = {*self.update.tensors(), *self.algorithm.tensors(), "update", "health", "source"}
        known |= {f"{OLDER}{version}" for version in resumed.older_weights()}
        known |= {f"update.{name}" for name in self.update.state()}
        names = {*resumed.tensors, *resumed.state}
        names |= {f"update.{name}" for name in resumed.state["update"]}
        if unknown := sorted(names - known):
            raise ValueError(f"it holds {unknown[0]}, which this version does not know")

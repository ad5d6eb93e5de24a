"""The state of a run: what its checkpoints hold, and how it goes back to one."""

from __future__ import annotations

from collections.abc import Mapping
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


class RunState:
    """Saves and loads the parts of a run that change from step to step.

    Args:
      folder: the folder of all checkpoints.
      keep: how many checkpoints to keep.
      processes: the processes of the run.
      update, algorithm, health, source: the parts.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        processes: Processes,
        update: PolicyUpdate,
        algorithm: Algorithm[Any],
        health: HealthMonitor,
        source: RolloutSource,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._processes = processes
        self._update = update
        self._algorithm = algorithm
        self._health = health
        self._source = source

    def sync(self, step: int) -> None:
        """Gives the engine the weights to sample with after a step."""
        weights = self._algorithm.sampling_weights(self._update.lora_state())
        self._source.sync_weights(weights, step)

    def save(self, step: int) -> None:
        """Writes the checkpoint of a step, on the main process."""
        if self._processes.is_main:
            state: Mapping[str, Any] = {
                "update": self._update.state(),
                "health": self._health.state_dict(),
            }
            older = self._source.older_weights()
            tensors: dict[str, Mapping[str, Tensor]] = {
                **self._update.tensors(),
                **{f"{OLDER}{version}": weights for version, weights in older.items()},
                **self._algorithm.tensors(),
            }
            checkpoint = Checkpoint(step=step, tensors=tensors, state=state)
            save_checkpoint(self._folder, checkpoint, keep=self._keep)
        self._processes.wait()

    def load(self, resumed: Checkpoint) -> None:
        """Goes back to a checkpoint. Raises CheckpointError if it is of another run."""
        try:
            self._update.load(resumed.tensors, resumed.state["update"])
            self._health.load_state_dict(resumed.state["health"])
            self._algorithm.load(resumed.tensors)
            lora = self._update.lora_state()
            for version, weights in sorted(resumed.older_weights().items()):
                older = check_tensors(f"{OLDER}{version}", weights, lora)
                self._source.sync_weights(older, version)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {resumed.step} in {self._folder.parent} is not one that "
                f"this run has written: {type(error).__name__}: {error}"
            ) from error

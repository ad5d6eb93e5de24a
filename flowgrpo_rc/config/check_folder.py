"""Checks of the folder that a run writes to: room, rights, and the run that it may hold already."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.records.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder, check_writable

FIRST_NEED = 64 * 2**20  # bytes of metrics, samples and a report


def check_output(config: Config, num_parameters: int = 0, num_bytes: int = 0) -> None:
    """Checks that the output folder can be written and that its disk has room for the checkpoints.

    A checkpoint holds each number of the LoRA four times in fp32 (weight, two moments, average),
    and once more for each step of `rollout.staleness`. It also holds the batches of `rollout.reuse`
    earlier steps.

    Args:
      config: the settings of the run.
      num_parameters: how many numbers the LoRA holds; 0 where that is not known yet.
      num_bytes: the size of a batch; 0 likewise.

    Raises:
      ValueError: the folder cannot be written, or there is too little room.
    """
    copies = 4 + config.rollout.staleness
    # A new checkpoint is written before the oldest one goes.
    num_checkpoints = config.trainer.max_checkpoints_to_keep + 1
    checkpoints = num_checkpoints * (num_parameters * 4 * copies + config.rollout.reuse * num_bytes)
    check_writable(Path(config.trainer.output_dir), needed_bytes=FIRST_NEED + checkpoints)


def config_of_run(config: Config) -> Config | None:
    """Returns the settings of the run in the output folder that would go on, if any."""
    folder = RunFolder(Path(config.trainer.output_dir))
    goes_on = config.trainer.resume_mode != "disable" and list_checkpoints(folder.checkpoints)
    return stored_config(folder.config) if goes_on else None


def checkpoint_to_resume(config: Config) -> Checkpoint | None:
    """Returns the newest checkpoint of the output folder, verified; None for a new run.

    Raises:
      ValueError: a run in the folder is still going on or has other settings, or there is one and
        `trainer.resume_mode=disable` asks for a new one.
      CheckpointError: the checkpoint is damaged.
    """
    folder = RunFolder(Path(config.trainer.output_dir))
    folder.check_free()
    checkpoints = list_checkpoints(folder.checkpoints)
    if config.trainer.resume_mode == "disable":
        if checkpoints or MetricsFile(folder.metrics).rows():
            raise ValueError(
                f"{folder.root} holds a run already: set trainer.resume_mode=auto to go on with "
                "it, or choose another trainer.output_dir"
            )
        return None
    if not checkpoints:
        return None
    stored = stored_config(folder.config)
    folder.check_same_run(dataclasses.asdict(stored), dataclasses.asdict(config))
    return load_checkpoint(checkpoints[-1])

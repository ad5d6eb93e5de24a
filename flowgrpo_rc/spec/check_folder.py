"""Checks of the folder that a run writes to: room, rights, and the run that it may hold already."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.records.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
)
from flowgrpo_rc.records.inputs import Input
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder, check_writable

FIRST_NEED = 64 * 2**20  # bytes of metrics, samples and a report


def check_output(config: Config, num_parameters: int = 0) -> None:
    """Checks that the output folder can be written and that the checkpoints fit on its disk."""
    needed = disk_bytes(config, num_parameters)
    check_writable(Path(config.trainer.output_dir), needed_bytes=needed)
    if config.model.prompt_cache not in (None, "memory"):
        check_writable(Path(config.model.prompt_cache), needed_bytes=0, key="model.prompt_cache")


def disk_bytes(config: Config, num_parameters: int) -> int:
    """Returns what a run writes to its folder at most, without saved rollouts.

    A checkpoint holds each number of the LoRA four times in fp32 (weight, two moments, average),
    and once more for each step of `rollout.staleness`.
    """
    copies = 4 + config.rollout.staleness
    # A new checkpoint is written before the oldest one goes, and the best one stays besides.
    num_checkpoints = config.trainer.max_checkpoints_to_keep + 2
    return FIRST_NEED + num_checkpoints * num_parameters * 4 * copies


def config_of_run(config: Config) -> Config | None:
    """Returns the settings of the run in the output folder that would go on, if any."""
    folder = RunFolder(Path(config.trainer.output_dir))
    goes_on = config.trainer.resume_mode != "disable" and list_checkpoints(folder.checkpoints)
    return stored_config(folder.config) if goes_on else None


def checkpoint_to_resume(config: Config, inputs: Mapping[str, Input]) -> Checkpoint | None:
    """Returns the newest whole checkpoint of the output folder; None for a new run.

    Damaged ones that are newer are passed over; `set_aside_after` moves them out of the way.
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
    folder.check_same_run(
        dataclasses.asdict(stored),
        dataclasses.asdict(config),
        inputs,
    )
    _check_length(stored, config)
    damage: list[CheckpointError] = []
    for path in reversed(checkpoints):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            damage.append(error)
    raise CheckpointError(
        f"{folder.checkpoints} has no whole checkpoint; choose another trainer.output_dir to start "
        f"over. The newest: {damage[0]}"
    )


def can_be_extended(config: Config) -> bool:
    """Returns whether a run that becomes longer equals one that was as long from the start."""
    return config.actor.optim.lr_scheduler == "constant"


def how_from_lora(config: Config, steps: int) -> str:
    """Says what to add to a command to train on from the LoRA of the run in the output folder."""
    root = config.trainer.output_dir
    lora = f"model.lora_path={RunFolder(Path(root)).lora}"
    added = (f"trainer.total_training_steps={steps}", lora, f"trainer.output_dir={root}_2")
    return f"to train on from its LoRA, add {shlex.join(added)}"


def _check_length(stored: Config, config: Config) -> None:
    """Raises ValueError if the run would get another length than its learning rate was made for."""
    steps = config.trainer.total_training_steps
    planned = stored.trainer.total_training_steps
    if steps == planned or can_be_extended(stored):
        return
    folder = RunFolder(Path(config.trainer.output_dir))
    message = (
        f"trainer.total_training_steps={steps}: the run in {folder.root} has {planned}, and its "
        f"learning rate changes until its end (actor.optim.lr_scheduler="
        f"{stored.actor.optim.lr_scheduler}), so it keeps its length; give {planned}, or "
        "another trainer.output_dir for a fresh run"
    )
    if folder.lora.is_dir():
        more = steps - planned if steps > planned else steps
        message += f"; {how_from_lora(config, more)}"
    raise ValueError(message)

"""The run that a command line names, looked for before the libraries of models are imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.records.checkpoint import list_checkpoints
from flowgrpo_rc.records.run_folder import RunFolder


def check_run_folder(arguments: argparse.Namespace) -> None:
    """Raises ValueError if eval or export is given something else than a run, or a wrong key."""
    if arguments.command == "evaluate":
        stored_config(RunFolder(Path(arguments.run_dir)).config, arguments.overrides)
    if arguments.command == "export":
        _, run_dir = checkpoint_and_run(arguments.checkpoint)
        stored_config(RunFolder(run_dir).config)


def checkpoint_and_run(given: str) -> tuple[Path, Path]:
    """Returns the folders of a checkpoint and of its run.

    Args:
      given: the folder of either; of a run the newest checkpoint is taken.

    Raises:
      ValueError: there is no checkpoint.
    """
    path = Path(given)
    if path.parent.name == "checkpoints":
        return path, path.parent.parent
    found = list_checkpoints(RunFolder(path).checkpoints)
    if not found:
        raise ValueError(
            f"{given} has no checkpoints: give a run's folder or one of its checkpoints/step_N"
        )
    return found[-1], path

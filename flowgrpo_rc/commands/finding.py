"""The run that a command line names, looked for before the libraries of models are imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.config.trust import check_plain, check_secrets, check_trusted
from flowgrpo_rc.evaluation.suite import HOW_TO_CHANGE
from flowgrpo_rc.records.checkpoint import list_checkpoints
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.spec.check_inputs import suites_of


def check_run_folder(arguments: argparse.Namespace) -> None:
    """Checks the run that evaluate or export is given, and whether evaluate may import its code."""
    if arguments.command == "evaluate":
        how = None if arguments.trust else "--trust"
        folder = Path(arguments.run_dir)
        config = stored_config(RunFolder(folder).config, arguments.overrides)
        check_evaluated(folder, config, arguments.suite or [], how)
    if arguments.command == "export":
        _, run_dir = checkpoint_and_run(arguments.checkpoint)
        path = RunFolder(run_dir).config
        stored_config(path)
        check_plain(path)


def check_evaluated(run_dir: Path, config: Config, suites: Sequence[str], how: str | None) -> None:
    """Checks a run that is to be evaluated; `how` says how to trust its code, None if it is."""
    path = RunFolder(run_dir).config
    config.trainer.suites = []  # those of the run are not asked
    check_plain(path)
    if how is not None:
        check_trusted(path, config, how)
    check_secrets(config)
    config.trainer.suites = list(suites)
    overridden = config.rollout.val_kwargs
    stored = stored_config(path).rollout.val_kwargs
    for suite in suites_of(config):
        for key, pinned in suite.sampler.items():
            value = getattr(overridden, key)
            if value not in (pinned, getattr(stored, key)):
                raise ValueError(
                    f"rollout.val_kwargs.{key}={value} does not reach suite {suite.name}, which "
                    f"pins {key}={pinned}: drop it, or {HOW_TO_CHANGE.format(suite.name)}"
                )


def checkpoint_and_run(place: str) -> tuple[Path, Path]:
    """Returns the folders of a checkpoint, for a run its newest one, and of its run."""
    path = Path(place)
    if path.parent.name == "checkpoints":
        return path, path.parent.parent
    checkpoints = list_checkpoints(RunFolder(path).checkpoints)
    if not checkpoints:
        raise ValueError(
            f"{place} has no checkpoints: give a run's folder or one of its checkpoints/step_N"
        )
    return checkpoints[-1], path

"""Completes commands, options, configurations and settings in a shell, by argcomplete."""

import argparse
from collections.abc import Iterable
from typing import Any

from flowgrpo_rc.config.names import KEYS, config_folder

_NO_GROUPS = ("accelerate", "architectures")  # folders of configs/ that no word names


def complete(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Prints what the word at the cursor may become, for the shell, and ends the process."""
    import argcomplete

    for command in commands:
        for action in command._actions:
            completed: Any = action
            if action.dest == "config_name":
                completed.completer = _names
            elif action.dest == "overrides":
                completed.completer = _settings
    argcomplete.autocomplete(parser, always_complete_options="long")


def _names(**asked: Any) -> list[str]:
    return [path.stem for path in sorted(config_folder().glob("*.yaml"))]


def _settings(**asked: Any) -> list[str]:
    keys = [f"{key}=" for key in KEYS.read_text().split()]
    files = sorted(config_folder().glob("*/*.yaml"))
    groups = [(path.parent.name, path.stem) for path in files]
    return keys + [f"+{group}={name}" for group, name in groups if group not in _NO_GROUPS]

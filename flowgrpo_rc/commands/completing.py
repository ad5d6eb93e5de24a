"""Completes commands, options, configurations and settings in a shell, by argcomplete."""

import argparse
from collections.abc import Iterable

from flowgrpo_rc.config.names import KEYS, config_folder

_NO_GROUPS = ("accelerate", "architectures")  # folders of configs/ that no word names


def complete(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Prints what the word at the cursor may become, for the shell, and ends the process."""
    import argcomplete

    for command in commands:
        for action in command._actions:
            if action.dest in _COMPLETERS:
                vars(action)["completer"] = _COMPLETERS[action.dest]
    argcomplete.autocomplete(parser, always_complete_options="long")


def _names(**_: object) -> list[str]:
    return [path.stem for path in sorted(config_folder().glob("*.yaml"))]


def _settings(**_: object) -> list[str]:
    keys = [f"{key}=" for key in KEYS.read_text().split()]
    files = sorted(config_folder().glob("*/*.yaml"))
    groups = [(path.parent.name, path.stem) for path in files]
    return keys + [f"+{group}={name}" for group, name in groups if group not in _NO_GROUPS]


_COMPLETERS = {"config_name": _names, "overrides": _settings}

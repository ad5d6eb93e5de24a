"""The configuration that a command line asks for, for the commands that take overrides."""

from __future__ import annotations

import argparse
import sys

from flowgrpo_rc.config.compat import summary, table
from flowgrpo_rc.config.compose import Composition, compose_all
from flowgrpo_rc.distributed.child import is_child


def composed(arguments: argparse.Namespace) -> Composition:
    """Composes the configuration, and prints what was written in other words.

    Args:
      arguments: of a command with `overrides`, `config_name` and `config_dir`.

    Raises:
      ValueError: names the key, the value and what is allowed.
    """
    found = compose_all(
        arguments.overrides, config_name=arguments.config_name, config_dir=arguments.config_dir
    )
    asked_for_all = vars(arguments).get("cfg") is not None
    told = table if asked_for_all else summary
    if found.rows and not is_child():
        print(told(found.rows), file=sys.stderr)
    return found

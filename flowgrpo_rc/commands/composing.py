"""The configuration that a command line asks for, for the commands that take overrides.

It is composed and checked before the command's own module is imported, and with it the libraries of
models, which take seconds: a wrong setting is answered at once.
"""

import argparse
import sys

import torch

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.compose import as_yaml, compose_all, to_config
from flowgrpo_rc.config.names import CARD
from flowgrpo_rc.config.rows import summary, table
from flowgrpo_rc.distributed.child import is_child, launched_processes
from flowgrpo_rc.distributed.launch import launch
from flowgrpo_rc.spec.check_inputs import check_inputs
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.machine import (
    check_planned,
    in_gib,
    machine_here,
    machine_of,
    usable_cores,
)
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import Machine


def prepare(arguments: argparse.Namespace) -> int | None:
    """Composes and checks the configuration of a command that takes settings, and prints what was
    written in other words. The arguments get a `composition` and the `spec` of the run.

    A training of several processes is done here: they import what it needs, and this process waits.

    Returns the exit code if nothing is left to do, as with `--cfg job`; None otherwise.
    """
    composition = compose_all(
        _settings(arguments.overrides),
        config_name=arguments.config_name,
        config_dir=arguments.config_dir,
    )
    arguments.composition = composition
    if composition.rows and not is_child():
        told = table if vars(arguments).get("cfg") else summary
        print(told(composition.rows), file=sys.stderr)
    if arguments.command == "train" and arguments.cfg:
        print(as_yaml(composition.config), end="")
        return EXIT_OK
    composition.check()
    config = to_config(composition.config)
    if arguments.command == "plan":  # for another machine, which may have other files
        count = arguments.processes
        if count is None:
            count = config.trainer.num_processes
        processes = count if isinstance(count, int) else 1
        check_planned(processes, arguments.nodes, arguments.tflops)
        arguments.spec = resolve(config, Machine(torch.device("cuda"), processes))
        check_settings(arguments.spec)
        if arguments.fit is not None:
            size = CARD if arguments.fit == CARD else f"{in_gib('--fit', arguments.fit):g}"
            what = "measures what one and two samples need; a large model takes half a minute"
            print(f"--fit {size}: {what}", file=sys.stderr)
        return None
    trains = arguments.command == "train"
    machine = machine_of(config) if trains else machine_here(config)
    arguments.spec = resolve(config, machine)
    check_inputs(arguments.spec, trains=trains)
    if trains and not arguments.dry_run and launched_processes() is None:
        number = machine.num_processes
        if number > 1:
            command = [sys.executable, "-m", "flowgrpo_rc.train", *arguments.words[1:]]
            return launch(command, number, max(1, usable_cores() // number))
    return None


def _settings(words: list[str]) -> list[str]:
    """Returns overrides, after a check that each is one, and not the rest of an unquoted value."""
    for place, word in enumerate(words):
        if "=" in word or word.startswith("~"):
            continue
        if place == 0:
            raise ValueError(f"{word!r} is no setting: settings are written key=value")
        # Words up to the next setting, which the shell has split from this one's value.
        rest = [other for other in words[place:] if "=" not in other]
        whole = " ".join([words[place - 1], *rest])
        raise ValueError(
            f"{word!r} is no setting; if it belongs to the value before it, quote both together: "
            f"'{whole}'"
        )
    return words

"""`flowgrpo-rc plan`: what a run would do and need, computed from its configuration.

With `--fit` it proposes settings that fit a card.
"""

import argparse
from dataclasses import asdict

import torch

from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.config.check_settings import check_settings
from flowgrpo_rc.config.compose import config_folder, unchecked_config
from flowgrpo_rc.config.machine import check_planned
from flowgrpo_rc.config.names import RATE
from flowgrpo_rc.config.settle import settled
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.planning.fit import Fitter, Proposal, gib_of
from flowgrpo_rc.planning.plan import Plan, job_of, make_plan
from flowgrpo_rc.report.facts import told


def main(arguments: argparse.Namespace) -> int:
    """Prints the plan of the configuration that the command line asks for."""
    given = unchecked_config(arguments.composition.config)
    asked = given.trainer.num_processes if arguments.processes is None else arguments.processes
    processes = asked if isinstance(asked, int) else 1
    found = planned(given, processes, arguments.nodes, arguments.fit, arguments.tflops)
    if isinstance(found, Proposal):
        print(found)
        return EXIT_OK if found.fits else EXIT_FAILED
    config = settled(given, torch.device("cuda"))
    trained = told(asdict(config), asdict(given), has_mode=not config.knows_no_log_probs())
    print(f"{found}\n\ntrains\n{trained}")
    return EXIT_OK


def planned(
    given: Config, processes: int, nodes: int, fit: float | str | None, tflops: float = RATE
) -> Plan | Proposal:
    """Plans a run on processes, or with `fit` proposes settings for a card.

    `fit` is its GiB, or `card` for the first one of this machine; `tflops` are those of a second.
    """
    check_planned(processes, nodes, tflops)
    size = None if fit is None else gib_of(fit)
    check_settings(given, processes)
    config = settled(given, torch.device("cuda"))
    job = job_of(config, processes, config_folder() / "architectures", nodes=nodes)
    return make_plan(job, tflops=tflops) if size is None else Fitter(job).fit(size)

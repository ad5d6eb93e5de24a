"""`flowgrpo-rc plan`: what a run would do and need, computed from its configuration.

With `--fit` it proposes settings that fit a card, and with `--workers` it tells how fast a run
would be that samples with workers.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.config.compose import config_folder, to_config
from flowgrpo_rc.config.settle import settled
from flowgrpo_rc.planning.fit import Fitter
from flowgrpo_rc.planning.plan import job_of, make_plan
from flowgrpo_rc.planning.workers import worker_tables
from flowgrpo_rc.report.facts import told


def main(arguments: argparse.Namespace) -> int:
    """Prints the plan of the configuration that the command line asks for, or of workers."""
    if "composition" not in arguments:  # the settings are those of a run
        print(worker_tables(arguments))
        return EXIT_OK
    composed, processes, nodes = arguments.composition.config, arguments.processes, arguments.nodes
    if processes is None:
        asked = composed.trainer.num_processes
        processes = asked if isinstance(asked, int) else 1
    if processes < 1:
        raise ValueError(f"--processes {processes}: give at least 1")
    if nodes < 1 or processes % nodes:
        raise ValueError(f"--processes {processes} are not spread evenly over --nodes {nodes}")
    if arguments.fit is not None and not arguments.fit > 0:
        raise ValueError(f"--fit {arguments.fit:g}: give the GiB of a card, above 0")
    given = to_config(composed, num_processes=processes)
    config = settled(given, torch.device("cuda"))
    job = job_of(config, processes, config_folder() / "architectures", nodes=nodes)
    if arguments.fit is None:
        trained = told(asdict(config), asdict(given), has_mode=not config.knows_no_log_probs())
        print(f"{make_plan(job)}\n\ntrains\n{trained}")
        return EXIT_OK
    proposal = Fitter(job).fit(arguments.fit)
    print(f"{config.trainer.experiment_name} {proposal.told(arguments.fit)}")
    return EXIT_OK if proposal.fits(arguments.fit) else EXIT_FAILED

"""`flowgrpo-rc plan`: what a run would do and need, computed from its configuration.

With `--fit` it proposes settings that fit a card.
"""

import argparse

from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.config.names import RATE
from flowgrpo_rc.planning.fit import Fitter, Proposal, gib_of
from flowgrpo_rc.planning.plan import Plan, job_of, make_plan
from flowgrpo_rc.spec.machine import check_planned
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.spec.tell import lines_of, tell


def main(arguments: argparse.Namespace) -> int:
    """Prints the plan of the configuration that the command line asks for."""
    spec: RunSpec = arguments.spec
    result = planned(spec, arguments.nodes, arguments.fit, arguments.tflops)
    if isinstance(result, Proposal):
        print(result)
        return EXIT_OK if result.fits else EXIT_FAILED
    print(f"{result}\n\ntrains\n{lines_of(tell(spec))}")
    return EXIT_OK


def planned(
    spec: RunSpec, nodes: int, fit: float | str | None, tflops: float = RATE
) -> Plan | Proposal:
    """Plans a run, or with `fit` proposes settings for a card.

    `fit` is its GiB, or `card` for the first one of this machine; `tflops` are those of a second.
    """
    check_planned(spec.machine.num_processes, nodes, tflops)
    size = None if fit is None else gib_of(fit)
    job = job_of(spec, nodes=nodes)
    return make_plan(job, tflops=tflops) if size is None else Fitter(job).fit(size)

"""The whole bundled job with a plain and with a centered log-ratio.

    python examples/studies/whole_job.py [--seeds 5] [--workers 1] [--results FOLDER]

The ladder stops after 40 iterations at a constant learning rate. Here configs/tiny_ocr.yaml runs to
its end, 150 iterations, with each log-ratio and the same seeds. Each run is a process of its own
with one thread, and leaves one file in FOLDER/whole_job; runs that have their file are skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import RESULTS, make_missing
from learning import RC, Run, measure

STUDY = "whole_job"
ROLLOUT = "bf16"
ARMS: Mapping[str, Sequence[str]] = {
    "plain": (f"{RC}.centered=false",),
    "centered": (f"{RC}.centered=true",),
}
BUDGET = (f"rollout.dtype={ROLLOUT}", "trainer.num_processes=1", "trainer.logger=[]")


def overrides(run: Run) -> list[str]:
    """Lists the overrides of a run."""
    return [*BUDGET, *ARMS[run.arm]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    runs = [Run(ROLLOUT, arm, seed) for seed in range(1, given.seeds + 1) for arm in ARMS]

    def make(run: Run) -> None:
        measure(run, overrides(run), STUDY, given.results)

    make_missing(STUDY, runs, make, workers=given.workers, folder=given.results)


if __name__ == "__main__":
    main()

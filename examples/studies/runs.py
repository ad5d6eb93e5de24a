"""A run of a study: trains once in a process of its own, and keeps the numbers of its table."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cells import RESULTS, save

RC = "algorithm.rollout_correction"
CLIP = "actor.diffusion_loss.clip_ratio"

# Name in a cell -> metric of the run; in bypass mode its name has a prefix.
CURVES = {
    "reward": "reward/mean",
    "clip_fraction": "actor/clip_fraction",
    "eff_sample_size": "rollout_corr/rollout_is_eff_sample_size",
    "rejected_fraction": "rollout_corr/rollout_rs_masked_fraction",
    "mismatch": "rollout_corr/logprob_abs_diff_mean",
    "seconds": "timing_s/step",
    "saved_blocks": "rollout/saved_blocks_fraction",
    "rollout_seconds": "timing_s/rollout",
}


class Run(NamedTuple):
    """One cell with one seed.

    Attributes:
      rollout: a key of the study's `ROLLOUTS`.
      arm: a key of its `ARMS`.
      seed: seed of the run.
    """

    rollout: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Returns the name of the run's file."""
        return f"{self.rollout}_{self.arm}_seed{self.seed}"


def measure(
    run: Run,
    settings: Sequence[str],
    study: str,
    results: Path,
    also: Callable[[str, Path, Path], None] | None = None,
) -> None:
    """Trains once, keeps the numbers that the study needs, and deletes the run's folder.

    Args:
      run: the run.
      settings: the overrides of its command, without its seed and its folder.
      study: the study that it belongs to.
      results: the folder of all studies.
      also: what else is measured, from the run's name, its folder and `results`.

    Raises:
      RuntimeError: the training failed; the message holds its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        own = (f"trainer.seed={run.seed}", f"trainer.output_dir={root}")
        command = [sys.executable, "-m", "flowgrpo_rc.train", *settings, *own]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(Path(folder) / "said.txt", "w+") as said:
            process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT
            )
            # wait4 gives the usage of this process alone.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                said.seek(0)
                raise RuntimeError(f"{run.name} failed:\n{said.read()}")
        rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        if also is not None:
            also(run.name, root, results)
    save(study, run.name, summary(run, rows, usage), results)


def summary(
    run: Run, rows: Sequence[Mapping[str, float]], usage: resource.struct_rusage
) -> dict[str, Any]:
    """Makes the content of a run's file.

    Args:
      run: the run.
      rows: the rows of its metrics.jsonl.
      usage: the resources that its process used.

    Returns:
      Its reward on held-out words before and after, and its curves by iteration.
    """
    evaluated = [row for row in rows if "val/reward" in row]
    steps = rows[1:]  # the first row is the evaluation before training
    curves = {name: [_value(row, metric) for row in steps] for name, metric in CURVES.items()}
    return {
        **run._asdict(),
        "before": evaluated[0]["val/reward"],
        "after": evaluated[-1]["val/reward"],
        "exact_before": evaluated[0]["val/ocr/exact"],
        "exact_after": evaluated[-1]["val/ocr/exact"],
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "curves": {name: curve for name, curve in curves.items() if None not in curve},
    }


def _value(row: Mapping[str, float], metric: str) -> float | None:
    return row.get(metric, row.get(f"actor/{metric}"))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a study's command with the options that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; refuses quick runs among the results that are kept."""
    options = parser.parse_args(arguments)
    if options.quick and options.results == RESULTS:
        parser.error("--quick needs a folder of its own: give --results")
    return options

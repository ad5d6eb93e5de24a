"""The learning study: the effect of mismatch and its correction on the bundled OCR task.

    python examples/studies/learning.py [--full | --quick] [--seeds 5] [--workers 1]
        [--results FOLDER]

A cell is a rollout (`ROLLOUTS`) with an arm (`ARMS`). All cells have the same budget and the same
five seeds. Each run is a process of its own with one thread, and leaves one file in
FOLDER/learning. Runs that have their file are skipped, so the same command goes on after an
interruption.

The cells that matter most run first: all of them with their first seed, then all with their second,
so a study that is stopped is balanced. --full adds further cells after them; --quick is one short
run, to see that the study works.
"""

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

from cells import PLAIN_JOB, RESULTS, make_missing, save

STUDY = "learning"
RC = "algorithm.rollout_correction"
CLIP = "actor.diffusion_loss.clip_ratio"

ROLLOUTS: Mapping[str, Sequence[str]] = {
    "fp32": ("rollout.dtype=fp32",),
    "bf16": (),
    "int4": ("rollout.quantization=int4",),
    "int8": ("rollout.quantization=int8_dynamic",),
    "stale": ("rollout.staleness=4",),
    "fault": ("rollout.name=learning_faults.LateLatents",),
}
PLAIN = f"{RC}.centered=false"
AUTO = (f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=auto:4")
ARMS: Mapping[str, Sequence[str]] = {
    "bypass": (f"{RC}=bypass_ppo_clip",),
    "recipe": (
        f"{RC}.bypass_mode=true",
        PLAIN,
        f"{RC}.rollout_is=sequence",
        f"{RC}.rollout_rs=seq_mean_k1",
        f"{RC}.rollout_rs_threshold='0.5_2.0'",
    ),
    "calibrated": (f"{RC}.bypass_mode=true", PLAIN, *AUTO),
    "recomputed": (f"{RC}=disabled",),
    "recomputed_tight": (f"{RC}=disabled",),
    "is": (f"{RC}=decoupled_seq_is",),
    "is_rs": (f"{RC}.bypass_mode=false", PLAIN, f"{RC}.rollout_is=sequence", *AUTO),
    "guard": (f"{RC}=bypass_ppo_clip", "actor.diffusion_loss.loss_mode=grpo_guard"),
}
TIGHT = 1e-4  # the clip of the published recipes
WIDE = 1e-3  # above the mismatch of bf16
WIDER = 1e-2  # above the mismatch of int4, which is ten times as large
CLIPS = {"recipe": TIGHT, "recomputed_tight": TIGHT, "guard": WIDER}
MATTER = (
    ("fp32", "bypass"),
    ("int4", "recipe"),
    ("int4", "recomputed"),
    ("int4", "guard"),
    ("bf16", "recipe"),
    ("bf16", "calibrated"),
    ("stale", "recipe"),
    ("stale", "is"),
    ("fault", "recipe"),
    ("fault", "is_rs"),
)
FURTHER = (
    ("int4", "calibrated"),
    ("stale", "bypass"),
    ("int8", "recipe"),
    ("stale", "guard"),
    ("fp32", "recipe"),
    ("bf16", "is_rs"),
    ("int4", "is_rs"),
    ("int4", "recomputed_tight"),
    ("fault", "recomputed"),
    ("int4", "bypass"),
    ("bf16", "recomputed"),
    ("stale", "recomputed"),
    ("fault", "calibrated"),
    ("bf16", "is"),
    ("int4", "is"),
    ("stale", "is_rs"),
    ("int8", "recomputed"),
    ("int8", "is_rs"),
)

# The differences of every run from configs/tiny_ocr.yaml: a third of its iterations, all of them
# at the full learning rate, and nothing that makes them faster.
BUDGET = (
    *PLAIN_JOB,
    "rollout.dtype=bf16",
    "rollout.algo.tail_steps=null",
    "actor.steps_per_forward=1",
    "trainer.num_processes=1",
    "actor.optim.lr_scheduler=constant",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "trainer.logger=[]",
)
ITERATIONS = 40
WHOLE = (
    *BUDGET,
    f"trainer.total_training_steps={ITERATIONS}",
    "rollout.val_kwargs.n=256",
    "actor.ppo_micro_batch_size_per_gpu=24",
)
QUICK = (
    *BUDGET,
    "trainer.total_training_steps=2",
    "rollout.val_kwargs.n=8",
    "data.train_batch_size=2",
    "rollout.n=4",
    "actor.ppo_micro_batch_size_per_gpu=8",
)
QUICK_CELLS = (("fault", "is_rs"),)

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
      rollout: a key of `ROLLOUTS`.
      arm: a key of `ARMS`.
      seed: seed of the run.
    """

    rollout: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Returns the name of the run's file."""
        return f"{self.rollout}_{self.arm}_seed{self.seed}"


def overrides(run: Run, budget: Sequence[str]) -> list[str]:
    """Lists the overrides of a run: the budget of all runs, and the settings of its cell."""
    clip = WIDER if run[:2] == ("int4", "calibrated") else CLIPS.get(run.arm, WIDE)
    return [*budget, *ROLLOUTS[run.rollout], *ARMS[run.arm], f"{CLIP}={clip}"]


def plan(cells: Sequence[tuple[str, str]], num_seeds: int) -> list[Run]:
    """Lists the runs in their order.

    The cells that matter come with their first seed, then with their second, and so on. The further
    cells follow in the same way.

    Args:
      cells: (rollout, arm) of each cell.
      num_seeds: runs of each cell.

    Returns:
      The runs.
    """
    first = set(MATTER) if set(MATTER) <= set(cells) else set(cells)
    groups = [[cell for cell in cells if (cell in first) == early] for early in (True, False)]
    runs = []
    for group in groups:
        for seed in range(1, num_seeds + 1):
            runs += [Run(*cell, seed) for cell in group]
    return runs


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


def main() -> None:
    """Parses the command line and makes the runs that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs a folder of its own: give --results")
    budget = QUICK if given.quick else WHOLE
    cells = MATTER + FURTHER if given.full else MATTER
    if given.quick:
        cells = QUICK_CELLS

    def make(run: Run) -> None:
        measure(run, overrides(run, budget), STUDY, given.results)

    runs = plan(cells, 1 if given.quick else given.seeds)
    make_missing(STUDY, runs, make, workers=given.workers, folder=given.results)


if __name__ == "__main__":
    main()

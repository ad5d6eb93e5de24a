"""The learning study: the effect of mismatch and its correction on the bundled OCR task.

    python examples/studies/learning.py [--full | --ladder | --quick] [--seeds 5] [--workers 1]
        [--results FOLDER]

A cell is a rollout (`ROLLOUTS`) with an arm (`ARMS`). All cells have the same budget and the same
five seeds. Each run is a process of its own with one thread, and leaves one file in
FOLDER/learning. Runs that have their file are skipped, so the same command goes on after an
interruption.

The cells that matter most run first: all of them with their first seed, then all with their second,
so a study that is stopped is balanced. --full adds further cells after them; --quick is two short
runs, to see that the study works.

--ladder, into FOLDER/ladder, asks how cheap a rollout may be: rollouts that are each cheaper or
worse than the last (`LADDER`), with five arms (`CLIMBERS`). The rule, written down before its first
run:

* The result of a cell is the reward on 256 held-out words after 40 iterations, averaged over five
  seeds, with its standard error.
* One arm beats another on a rollout if their means differ by more than two standard errors of the
  difference, taken seed by seed. Otherwise they are level.
* A rollout is good enough for an arm if the arm is not beaten by exact rollouts (fp32, bypass).
* The default is the arm that is good enough on most rollouts; of two arms that are level, the one
  that costs less CPU time.
* No setting of an arm is changed after its first run. Clips: 1e-4 for the recipe, as published;
  1e-3 about a recomputed old policy, where no mismatch is in the ratio; auto:4 in bypass mode. The
  arm centered with auto:16 took the place of the one with auto:4 after the first runs of bf16, int8
  and int4, when the gradient study had found auto:4 narrow. Those runs are kept and not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from cells import RESULTS, save

STUDY = "learning"
LADDER_STUDY = "ladder"
RC = "algorithm.rollout_correction"
CLIP = "actor.diffusion_loss.clip_ratio"

ROLLOUTS: Mapping[str, Sequence[str]] = {
    "fp32": ("rollout.dtype=fp32",),
    "bf16": (),
    "int4": ("rollout.quantization=int4",),
    "int8": ("rollout.quantization=int8_dynamic",),
    "stale": ("rollout.staleness=4",),
    "fault": ("rollout.name=learning_faults.LateLatents",),
    "int4_old8": ("rollout.quantization=int4", "rollout.staleness=8"),
    "int4_old16": ("rollout.quantization=int4", "rollout.staleness=16"),
    "bits3": ("rollout.name=learning_rollouts.FewBits", "+rollout.engine_kwargs.bits=3"),
    "bits2": ("rollout.name=learning_rollouts.FewBits", "+rollout.engine_kwargs.bits=2"),
    "reuse": ("rollout.name=learning_rollouts.ReusedVelocity",),
    "skip": ("rollout.name=learning_rollouts.SkippedBlock", "+rollout.engine_kwargs.block=3"),
}
AUTO = (f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=auto:4")
ARMS: Mapping[str, Sequence[str]] = {
    "bypass": (f"{RC}=bypass_ppo_clip",),
    "recipe": (
        f"{RC}.bypass_mode=true",
        f"{RC}.rollout_is=sequence",
        f"{RC}.rollout_rs=seq_mean_k1",
        f"{RC}.rollout_rs_threshold='0.5_2.0'",
    ),
    "calibrated": (f"{RC}.bypass_mode=true", *AUTO),
    "recomputed": (f"{RC}=disabled",),
    "recomputed_tight": (f"{RC}=disabled",),
    "is": (f"{RC}=decoupled_seq_is",),
    "is_rs": (f"{RC}.bypass_mode=false", f"{RC}.rollout_is=sequence", *AUTO),
    "guard": (f"{RC}=bypass_ppo_clip", "actor.diffusion_loss.loss_mode=grpo_guard"),
    "guard_auto": (f"{RC}=bypass_ppo_clip", "actor.diffusion_loss.loss_mode=grpo_guard"),
    "centered": (f"{RC}=bypass_ppo_clip", f"{RC}.centered=true"),
    "centered_wide": (f"{RC}=bypass_ppo_clip", f"{RC}.centered=true"),
    "centered_recomputed": (f"{RC}=disabled", f"{RC}.centered=true"),
}
TIGHT = 1e-4  # the clip of the published recipes
WIDE = 1e-3  # above the mismatch of bf16
WIDER = 1e-2  # above the mismatch of int4, which is ten times as large
FITTING = "auto:4"  # above the mismatch of single steps
WIDE_FITTING = "auto:16"  # above what an update moves, and the tails of old weights
CLIPS = {
    "recipe": TIGHT,
    "recomputed_tight": TIGHT,
    "guard": WIDER,
    "guard_auto": FITTING,
    "centered": FITTING,
    "centered_wide": WIDE_FITTING,
}
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

LADDER = (
    "bf16",
    "int8",
    "int4",
    "int4_old8",
    "int4_old16",
    "bits3",
    "bits2",
    "reuse",
    "skip",
)
CLIMBERS = (
    "centered_wide",
    "recomputed",
    "centered_recomputed",
    "guard_auto",
    "recipe",
)

# The differences of every run from configs/tiny_ocr.yaml: a quarter of its iterations, all of them
# at the full learning rate, and nothing that makes them faster.
BUDGET = (
    "rollout.dtype=bf16",
    "rollout.algo.tail_steps=null",
    "rollout.algo.shared_prefix=false",
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
QUICK_CELLS = (("fp32", "bypass"), ("fault", "is_rs"))

# Name in a file -> metric of the run; in bypass mode its name has a prefix.
CURVES = {
    "reward": "reward/mean",
    "clip_fraction": "actor/clip_fraction",
    "eff_sample_size": "rollout_corr/rollout_is_eff_sample_size",
    "rejected_fraction": "rollout_corr/rollout_rs_masked_fraction",
    "seconds": "timing_s/step",
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

    @property
    def clip_ratio(self) -> float | str:
        """Returns the clip of the run."""
        if (self.rollout, self.arm) == ("int4", "calibrated"):
            return WIDER
        return CLIPS.get(self.arm, WIDE)

    def overrides(self, budget: Sequence[str], folder: Path) -> list[str]:
        """Lists the overrides of the run's command: its budget, its settings, and its folder."""
        own = (
            f"{CLIP}={self.clip_ratio}",
            f"trainer.seed={self.seed}",
            f"trainer.output_dir={folder}",
        )
        return [*budget, *ROLLOUTS[self.rollout], *ARMS[self.arm], *own]


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


def measure(run: Run, budget: Sequence[str], study: str, results: Path) -> None:
    """Trains once, keeps the numbers that the study needs, and deletes the run's folder.

    Args:
      run: the run.
      budget: overrides that all runs share.
      study: the folder of its file in `results`.
      results: the folder of all studies.

    Raises:
      RuntimeError: the training failed; the message holds its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        command = [sys.executable, "-m", "flowgrpo_rc.train", *run.overrides(budget, root)]
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
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs a folder of its own: give --results")
    budget = QUICK if given.quick else WHOLE
    study = LADDER_STUDY if given.ladder else STUDY
    cells = MATTER + FURTHER if given.full else MATTER
    if given.ladder:
        cells = tuple((rollout, arm) for rollout in LADDER for arm in CLIMBERS)
    if given.quick:
        cells = QUICK_CELLS

    def work(run: Run) -> None:
        # The ladder shares some runs with the study of five seeds.
        files = (given.results / name / f"{run.name}.json" for name in {study, STUDY})
        if not any(file.is_file() for file in files):
            measure(run, budget, study, given.results)
            print(run.name, flush=True)

    executor = ThreadPoolExecutor(given.workers)
    futures = [executor.submit(work, run) for run in plan(cells, 1 if given.quick else given.seeds)]
    try:
        wait(futures)
    finally:
        executor.shutdown(cancel_futures=True)
    # A run that failed stops no other, but the study ends with its error.
    for future in futures:
        future.result()


if __name__ == "__main__":
    main()

"""The gradient study: bias, variance and cosine of each estimator under mismatch.

    python examples/studies/gradient_study.py [--quick] [--output FOLDER]

It uses a flow whose gradient is known. The truth is the expected gradient of FlowGRPO's loss over
batches that the policy itself samples: mean-scale log-probs, advantages of 16 samples about their
prompt's mean over the batch's standard deviation, one batch of 1,024 samples. Policies, log-probs
and losses are in float64, the gradients of single steps in float32. An estimator sees batches that
a mismatched sampler made from the same prompts and the same noise. So the difference of two
gradients comes from the mismatch and not from the draw.

The parts, each with cells (lines of results/gradient.jsonl) of its own:

    regions      modes, log-ratios and trust regions; three sizes of the flow, three seeds; before
                 an update and after it; for one size, also multiples of the weight error of int4
    widths       the width of the clip of centered estimators, on two of these problems
    corrections  weights, rejection and the width of the clip; before an update

Cells that are there are not repeated. The study takes about 40 minutes on one core; `--quick
--output FOLDER` runs one small cell of each part in a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cells import RESULTS, Cell, load, save
from estimators import Estimator, calibrate
from gradient_batches import Gradients, Study
from gradient_corrections import corrections
from gradient_problem import PROMPTS, SAMPLES
from gradient_regions import CHOICES, SWEPT, Choice, regions, widths
from moments import Rows, estimate, inner, length, spread

STUDY = "gradient"
STALE = ("stale_1", "stale_2", "stale_4", "stale_8")
MISMATCHES = ("int4", "int8", "bf16", "stale_1", "stale_8", "guidance")
# For 64 elements alone, and without a clip: no mismatch, and multiples of the error of int4.
SWEEP = ("int4x0.5", "int4x1", "int4x2", "int4x4", "int4x8", "exact")
# The numbers that a cell of regions has of each estimator, in their order.
COLUMNS = (
    "cosine",
    "cosine_error",
    "chance",
    "chance_error",
    "rollout_cosine",
    "rollout_cosine_error",
    "lost",
)


class Job(NamedTuple):
    """The cells of one problem.

    Attributes:
      part: `regions`, `widths` or `corrections`.
      elements: size of the flow.
      seed: of the problem.
      mismatches: names of the mismatches.
      batches: batches of each mismatched sampler.
      truth: batches of the policy itself.
      fit: updates that fit the flow to the data.
      moves: on-policy updates that move the policy.
    """

    part: str
    elements: int
    seed: int
    mismatches: Sequence[str]
    batches: int
    truth: int
    fit: int = 1000
    moves: int = 12

    def cell_name(self, name: str) -> str:
        """Returns the name of a cell."""
        size = f"{name}_{self.elements}"
        return size if self.part == "corrections" else f"{self.part}_{size}_{self.seed}"


FULL = (
    Job("regions", 64, 0, (*MISMATCHES, *SWEEP), 12, 48),
    Job("regions", 16, 0, MISMATCHES, 8, 40),
    Job("regions", 256, 0, MISMATCHES, 8, 40),
    *(
        Job("regions", elements, seed, (*MISMATCHES, *(SWEEP if elements == 64 else ())), 8, 40)
        for seed in (1, 2)
        for elements in (64, 16, 256)
    ),
    # The problem on which `auto:4` is furthest from the truth, and the one with most batches.
    Job("widths", 256, 2, ("stale_1", "stale_8", "guidance"), 8, 40),
    Job("widths", 64, 0, ("stale_1", "stale_8", "guidance"), 12, 48),
    Job("corrections", 64, 0, ("bf16", "int8", "int4", "rounding", "guidance", *STALE), 48, 384),
    Job("corrections", 16, 0, ("bf16", "int4"), 48, 384),
    Job("corrections", 256, 0, ("bf16", "int4"), 48, 384),
)
QUICK = (
    Job("regions", 16, 0, ("int4", "int4x2"), 2, 3, fit=20, moves=2),
    Job("corrections", 16, 0, ("bf16",), 3, 4, fit=20, moves=2),
)


class Runner:
    """Measures the cells of one problem.

    Args:
      job: the problem and its cells.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._study = Study(job.elements, job.seed, fit=job.fit, moves=job.moves)
        self._truth = self._study.truth(self._study.policy, job.truth)
        self._after = self._truth
        if job.part != "corrections":
            self._after = self._study.truth(self._study.moved, job.truth)

    def cell(self, name: str) -> Cell:
        """Measures a mismatch, or `truth`."""
        start = time.process_time()
        if name == "truth":
            return {**self._head(), **self._truth_cell()}
        found = self._corrections(name) if self._job.part == "corrections" else self._regions(name)
        return {**self._head(), **found, "cpu_seconds": round(time.process_time() - start)}

    def _head(self) -> Cell:
        return {
            "seed": self._job.seed,
            "elements": self._job.elements,
            "batches": self._job.batches,
            "samples_per_batch": PROMPTS * SAMPLES,
        }

    def _truth_cell(self) -> Cell:
        """Measures how well the truth itself is known, and how Guard's differs from FlowGRPO's."""
        flow = self._truth.reward["flow_grpo"]
        guard = self._truth.reward["grpo_guard"]
        noise = (spread(flow) / inner(flow, flow)).sqrt()
        return {
            "truth_batches": len(flow),
            "batch_noise": noise.item(),
            "relative_error": (noise / len(flow) ** 0.5).item(),
            "guard_cosine": (inner(guard, flow) / (length(guard) * length(flow))).item(),
            "reward_by_update": self._study.reward_by_update[: self._job.moves],
        }

    def _corrections(self, mismatch: str) -> Cell:
        sampler = self._study.sampler(mismatch)
        pairs = self._study.calibration_pairs(sampler)
        seen = calibrate(pairs)
        given = corrections(seen, pairs)
        found = self._study.gradients(sampler, given, self._job.batches)
        results = {
            name: {**estimate(rows_of(name, given, found, self._truth)), **found.metrics[name]}
            for name in given
        }
        return {"calibration": seen._asdict(), "estimators": results}

    def _regions(self, mismatch: str) -> Cell:
        choices: Sequence[Choice] = SWEPT if mismatch in SWEEP else CHOICES
        sampler = self._study.sampler(mismatch)
        pairs = self._study.calibration_pairs(sampler)
        seen = calibrate(pairs)
        varies = self._job.part == "widths"
        given = widths(pairs) if varies else regions(seen, pairs, choices)
        before, after, own = self._study.gradients_of_both(sampler, given, self._job.batches)
        own_gradient = Rows(
            own.reward["flow_grpo"],
            own.chance["flow_grpo"],
            self._truth.reward["flow_grpo"],
            self._truth.chance["flow_grpo"][: self._job.batches],
            before.to_rollout,
        )
        shown = ("floor", "by_step", "clip", "centered_clip", "mean_kl")
        return {
            "calibration": {name: seen._asdict()[name] for name in shown},
            "rollout_cosine": estimate(own_gradient)["cosine"],
            "columns": COLUMNS,
            "first": {name: compared(name, given, before, self._truth, own) for name in given},
            "second": {name: compared(name, given, after, self._after, own) for name in given},
        }


def rows_of(name: str, given: dict[str, Estimator], found: Gradients, target: Gradients) -> Rows:
    """Returns the gradients of an estimator beside those of the target that it has."""
    own = given[name].estimand
    reward = found.reward[name]
    chance = target.chance[own][: len(reward)]
    return Rows(reward, found.chance[name], target.reward[own], chance, found.to_rollout)


def compared(
    name: str, given: dict[str, Estimator], found: Gradients, truth: Gradients, own: Gradients
) -> list[float | None]:
    """Compares an estimator with the policy's gradient, and with the rollout's own.

    Args:
      name: of the estimator.
      given: the estimators by name.
      found: their gradients.
      truth: the gradients of the policy itself.
      own: the gradients of the rollout's policy.

    Returns:
      The numbers of `COLUMNS`, to five decimals.
    """
    measured = estimate(rows_of(name, given, found, truth))
    at_rollout = estimate(rows_of(name, given, found, own))
    pairs = (measured["cosine"], measured["chance"], at_rollout["cosine"])
    numbers = [number for pair in pairs for number in pair or (None, None)]
    numbers.append(found.metrics[name]["gated"])
    return [None if number is None else round(number, 5) for number in numbers]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures the cells that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cells, to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for job in QUICK if options.quick else FULL:
        done = load(STUDY, options.output)
        missing = [name for name in ("truth", *job.mismatches) if job.cell_name(name) not in done]
        if not missing:
            continue
        runner = Runner(job)
        for name in missing:
            save(STUDY, job.cell_name(name), runner.cell(name), options.output)
            print(job.cell_name(name), flush=True)


if __name__ == "__main__":
    main()

"""The gradient study: bias, variance and cosine of each estimator under mismatch.

    python examples/studies/gradient_study.py [--quick] [--output FOLDER]

It uses a flow whose gradient is known. The truth is the expected gradient of FlowGRPO's loss over
batches that the policy itself samples: mean-scale log-probs, advantages of 16 samples about their
prompt's mean over the batch's standard deviation, one batch of 1,024 samples, before any update,
everything in float64. An estimator sees batches that a mismatched sampler made from the same
prompts and the same noise. So the difference of two gradients comes from the mismatch and not from
the draw.

Each cell (a size of the flow and a mismatch) is one file in results/gradient. Cells that are there
are not repeated. The study takes about 20 minutes on one core; `--quick --output FOLDER` runs one
small cell in a minute.

Legend: E estimators, M batches of a mismatched sampler, N batches of the policy itself, B samples,
T steps of the SDE window, P trained numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cells import RESULTS, Cell, save
from estimators import Estimator, Pair, calibrate, estimands, estimators
from flow import GUIDANCE, PROMPTS, SAMPLES, Evaluation, Problem, Sampler
from moments import Rows, estimate, inner, length, spread
from torch import Tensor

from flowgrpo_rc import DiffusionBatch
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.core.transition import GaussianSteps

STUDY = "gradient"
SEED = 0
LEARNING_RATE = 2e-3  # of the on-policy updates that lead to the policy of the study
CALIBRATION = 4  # batches that calibrate a mismatch


class Plan(NamedTuple):
    """The size of the study.

    Attributes:
      fit: updates that fit the flow to the data.
      moves: on-policy updates that move the policy.
      batches: batches of 1,024 samples for each mismatch, M.
      truth: batches of the policy itself, N.
      cells: size of the flow -> its mismatches.
    """

    fit: int
    moves: int
    batches: int
    truth: int
    cells: Mapping[int, Sequence[str]]


STALE = ("stale_1", "stale_2", "stale_4", "stale_8")
FULL = Plan(
    fit=1000,
    moves=12,
    batches=48,
    truth=384,
    cells={
        64: ("bf16", "int8", "int4", "rounding", "guidance", *STALE),
        16: ("bf16", "int4"),
        256: ("bf16", "int4"),
    },
)
QUICK = Plan(fit=20, moves=2, batches=3, truth=4, cells={16: ("bf16",)})


class Slopes(NamedTuple):
    """The slopes of each estimator's loss on one batch.

    Each loss is taken for the rewards, and again for the same rewards dealt out at random.

    Attributes:
      at_log_prob: slope at every log-prob, [2E, B, T].
      at_kl: slope at every KL, [2E, B, T].
      metrics: what else is reported, by estimator.
    """

    at_log_prob: Tensor
    at_kl: Tensor
    metrics: dict[str, dict[str, Any]]


class Gradients(NamedTuple):
    """The gradients of each estimator, one row for each batch.

    Attributes:
      reward: estimator -> gradients for the rewards, [M, P].
      chance: estimator -> gradients for the rewards dealt out at random, [M, P].
      metrics: estimator -> means of its metrics.
    """

    reward: dict[str, Tensor]
    chance: dict[str, Tensor]
    metrics: dict[str, dict[str, Any]]


class Study:
    """One size of the flow: the trained policy, its older versions, and the truth.

    Args:
      elements: number of elements of a sample.
      plan: the size of the study.
    """

    def __init__(self, elements: int, plan: Plan) -> None:
        self.problem = Problem(elements, SEED)
        self.plan = plan
        self.problem.fit(plan.fit)
        self.reward_by_update: list[float] = []
        self.versions = self._move()
        self.truth = self._truth()

    def _move(self) -> list[dict[str, Tensor]]:
        """Trains by FlowGRPO on the policy's own samples; returns the LoRA after each update."""
        problem = self.problem
        estimator = estimands()["flow_grpo"]
        lora = problem.lora()
        optimizer = torch.optim.Adam(list(lora.values()), lr=LEARNING_RATE)
        versions = []
        for index in range(self.plan.moves):
            batch, rewards = problem.rollout(Sampler(network=problem.network), index, "move")
            found = problem.evaluate(batch)
            slope, _, _ = estimator.slopes(estimator.settle(batch, found), rewards, found)
            gradient = problem.pull_back(batch, found.log_prob_slope, slope.unsqueeze(0))[0]
            parts = gradient.split([parameter.numel() for parameter in lora.values()])
            for parameter, part in zip(lora.values(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            problem.load(lora)
            versions.append(problem.lora())
            self.reward_by_update.append(rewards.mean().item())
        return versions

    def sampler(self, mismatch: str) -> Sampler:
        """Makes the sampler that takes the policy's place under a mismatch, given by its name."""
        kind, _, age = mismatch.partition("_")
        if kind == "guidance":
            return Sampler(network=self.problem.replica(), guidance=1.01 * GUIDANCE)
        if kind == "rounding":
            return Sampler(network=self.problem.replica(), rounds=True)
        if kind == "stale":
            self.problem.load(self.versions[-1 - int(age)])
            older = self.problem.replica()
            self.problem.load(self.versions[-1])
            return Sampler(network=older)
        quantization = None if kind == "bf16" else kind
        return Sampler(
            network=self.problem.replica(dtype=torch.bfloat16, quantization=quantization)
        )

    def _truth(self) -> Gradients:
        """The gradients on the policy's own samples."""
        on_policy = Sampler(network=self.problem.replica())
        given = estimands()
        rows = []
        for index in range(self.plan.truth):
            batch, rewards = self.problem.rollout(on_policy, index, "study")
            found = self.problem.evaluate(batch)
            slopes = all_slopes(given, batch, found, rewards, index)
            rows.append(self.problem.pull_back(batch, found.log_prob_slope, slopes.at_log_prob))
        return _by_estimator(torch.stack(rows, 1), given, [])

    def gradients(
        self, sampler: Sampler, given: Mapping[str, Estimator]
    ) -> tuple[Gradients, Tensor]:
        """Computes the gradients of every estimator on the same batches.

        Args:
          sampler: samples the batches.
          given: the estimators by name.

        Returns:
          The gradients, and those of the mean KL from the rollout, [M, P].
        """
        rows = []
        to_rollout = []
        metrics = []
        for index in range(self.plan.batches):
            batch, rewards = self.problem.rollout(sampler, index, "study")
            found = self.problem.evaluate(batch)
            slopes = all_slopes(given, batch, found, rewards, index)
            row = self.problem.pull_back(batch, found.log_prob_slope, slopes.at_log_prob)
            used = slopes.at_kl.flatten(1).any(1)
            mean = torch.full_like(found.log_probs, 1 / found.log_probs.numel()).unsqueeze(0)
            coefficients = torch.cat([slopes.at_kl[used], mean])
            by_kl = self.problem.pull_back(batch, found.kl_slope, coefficients)
            row[used] += by_kl[:-1]
            rows.append(row)
            to_rollout.append(by_kl[-1])
            metrics.append(slopes.metrics)
        return _by_estimator(torch.stack(rows, 1), given, metrics), torch.stack(to_rollout)


def calibration_pairs(problem: Problem, sampler: Sampler, count: int = CALIBRATION) -> list[Pair]:
    """Samples batches for calibration, which the study does not use.

    Args:
      problem: the flow.
      sampler: samples the batches.
      count: number of batches.

    Returns:
      The batches, each with the training graph on it.
    """
    batches = [problem.rollout(sampler, index, "calibration")[0] for index in range(count)]
    return [(batch, problem.evaluate(batch)) for batch in batches]


def all_slopes(
    given: Mapping[str, Estimator],
    batch: DiffusionBatch,
    found: Evaluation,
    rewards: Tensor,
    index: int,
) -> Slopes:
    """Computes the slopes of every estimator's loss on one batch.

    Args:
      given: the estimators by name.
      batch: the batch.
      found: the training graph on it.
      rewards: reward of each sample, [B].
      index: number of the batch, which the random order of the rewards follows from.

    Returns:
      The slopes.
    """
    order = torch.randperm(len(rewards), generator=generator(SEED, index, "chance"))
    both = _twice(batch)
    both_found = _twice_found(found)
    dealt = torch.cat([rewards, rewards[order]])
    at_log_prob = []
    at_kl = []
    metrics = {}
    for name, estimator in given.items():
        # A loss over both halves has half the slope of each half's own loss, hence the factor 2.
        settled = estimator.settle(both, both_found)
        slope, kl_slope, measured = estimator.slopes(settled, dealt, both_found)
        at_log_prob.append(2 * slope.unflatten(0, (2, -1)))
        at_kl.append(2 * kl_slope.unflatten(0, (2, -1)))
        metrics[name] = _shown(measured, settled, at_log_prob[-1][0], rewards)
    return Slopes(torch.cat(at_log_prob), torch.cat(at_kl), metrics)


def _by_estimator(
    columns: Tensor, given: Mapping[str, Estimator], metrics: Sequence[Any]
) -> Gradients:
    """Sorts gradients [2E, M, P] and the metrics of M batches by estimator."""
    pairs = dict(zip(given, columns.unflatten(0, (-1, 2)), strict=True))
    means = {}
    if metrics:
        for name in given:
            keys = metrics[0][name]
            means[name] = {key: _mean([one[name][key] for one in metrics]) for key in keys}
    return Gradients(
        {name: pair[0] for name, pair in pairs.items()},
        {name: pair[1] for name, pair in pairs.items()},
        means,
    )


def _twice(batch: DiffusionBatch) -> DiffusionBatch:
    """Every sample twice, in groups of their own.

    So one loss serves the rewards and the rewards dealt out at random.
    """
    doubled = batch.select(torch.arange(len(batch)).repeat(2))
    return doubled.replace(group=torch.cat([batch.group, batch.group + PROMPTS]))


def _twice_found(found: Evaluation) -> Evaluation:
    """The evaluation of every sample twice."""
    gaussian = GaussianSteps(*(torch.cat([part, part]) for part in found.gaussian))
    return Evaluation(
        torch.cat([found.log_probs] * 2), gaussian, *(torch.cat([part] * 2) for part in found[2:])
    )


def _shown(
    measured: Mapping[str, float], settled: DiffusionBatch, slope: Tensor, rewards: Tensor
) -> dict[str, Any]:
    """The reported metrics, and the fraction of |advantage| whose log-prob has no slope."""
    centred = rewards - rewards.view(-1, SAMPLES).mean(1).repeat_interleave(SAMPLES)
    size = centred.abs().unsqueeze(1).expand_as(slope)
    gated = torch.where(slope == 0, size, 0.0).sum(0) / size.sum(0)
    mask = settled.rejection_mask
    weights = settled.rollout_is_weights
    kept = 1.0 if mask is None else mask.double().mean().item()
    ess = measured.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
    if weights is not None:
        ess = (weights.mean() ** 2 / (weights**2).mean()).item()
    return {
        "gated": gated.mean().item(),
        "gated_by_step": gated.tolist(),
        "clip_fraction": measured.get("clip_fraction", 0.0),
        "rejected": measured.get("rollout_corr/rollout_rs_masked_fraction", 1 - kept),
        "effective_samples": ess,
    }


def _mean(values: Sequence[Any]) -> Any:
    return torch.tensor(values, dtype=torch.float64).mean(0).tolist()


def run_cell(study: Study, mismatch: str) -> Cell:
    """Measures every estimator under one mismatch.

    Args:
      study: one size of the flow.
      mismatch: its name.

    Returns:
      The cell.
    """
    start = time.process_time()
    sampler = study.sampler(mismatch)
    truth = study.truth
    pairs = calibration_pairs(study.problem, sampler)
    seen = calibrate(pairs)
    given = estimators(seen, pairs)
    found, to_rollout = study.gradients(sampler, given)
    count = len(to_rollout)
    results = {}
    for name, estimator in given.items():
        own = estimator.estimand
        own_chance = truth.chance[own][:count]
        rows = Rows(
            found.reward[name], found.chance[name], truth.reward[own], own_chance, to_rollout
        )
        results[name] = {**estimate(rows), **found.metrics[name]}
    seconds = round(time.process_time() - start)
    return {
        **_head(study),
        "calibration": seen._asdict(),
        "estimators": results,
        "cpu_seconds": seconds,
    }


def truth_cell(study: Study) -> Cell:
    """Measures how well the truth itself is known, and how Guard's differs from FlowGRPO's."""
    flow = study.truth.reward["flow_grpo"]
    guard = study.truth.reward["grpo_guard"]
    noise = (spread(flow) / inner(flow, flow)).sqrt()
    return {
        **_head(study),
        "truth_batches": len(flow),
        "batch_noise": noise.item(),
        "relative_error": (noise / len(flow) ** 0.5).item(),
        "guard_cosine": (inner(guard, flow) / (length(guard) * length(flow))).item(),
        "reward_by_update": study.reward_by_update,
    }


def _head(study: Study) -> Cell:
    return {
        "seed": SEED,
        "elements": study.problem.elements,
        "batches": study.plan.batches,
        "samples_per_batch": PROMPTS * SAMPLES,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures the cells that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small cell, to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = QUICK if options.quick else FULL
    for elements, mismatches in plan.cells.items():
        files = {
            name: options.output / STUDY / f"{name}_{elements}.json"
            for name in ("truth", *mismatches)
        }
        missing = [name for name, file in files.items() if not file.exists()]
        if not missing:
            continue
        study = Study(elements, plan)
        for name in missing:
            cell = truth_cell(study) if name == "truth" else run_cell(study, name)
            save(STUDY, files[name].stem, cell, options.output)
            print(files[name].stem, flush=True)


if __name__ == "__main__":
    main()

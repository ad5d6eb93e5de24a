"""The gradient study: bias, variance and cosine of each estimator under mismatch, on a flow whose gradient is known.

    python examples/studies/gradient_study.py [--quick] [--cells NAME ...]

The truth is the expected gradient, over batches that the policy itself samples, of FlowGRPO's loss: mean-scale
log-probs, advantages of 16 samples about their prompt's mean over the batch's standard deviation, one batch of 1,024
samples, before any update; everything in float64. An estimator sees batches that a mismatched sampler made from the
same prompts and the same noise, so that the difference of two gradients is the mismatch's doing and not the draw's.

Each cell (a size of the flow and a mismatch) is one file in results/gradient; cells that are there are not repeated.
About half an hour on one core; `--quick` runs two small cells in a minute and writes them elsewhere.
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
from torch import Tensor

from flowgrpo_rc import DiffusionBatch
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.core.transition import GaussianSteps

STUDY = "gradient"
SEED = 0
MOVES, LEARNING_RATE = 12, 2e-3  # on-policy updates that lead to the policy of the study
BLOCKS = 16  # of batches, for the jackknife
MAIN, OTHERS = 64, (16, 256)  # elements of a sample
MISMATCHES = ("bf16", "int8", "int4", "guidance", "stale_1", "stale_2", "stale_4", "stale_8")
ELSEWHERE = ("bf16", "int4")


class Gradients(NamedTuple):
    """One row for each batch [M, P]: of the loss, of the loss with the rewards dealt out at random, and what the
    estimators' metrics were."""

    reward: Tensor
    chance: Tensor
    metrics: list[dict[str, float]]


class Study:
    """One size of the flow: the trained policy, its older versions, and the truth."""

    def __init__(self, elements: int, batches: int, fit: int | None = None) -> None:
        self.problem, self.batches = Problem(elements, SEED), batches
        self.problem.fit() if fit is None else self.problem.fit(fit)
        self.versions = self._move()
        on_policy = Sampler(network=self.problem.replica())
        self.truth, _ = self.gradients(on_policy, estimands())

    def _move(self) -> list[dict[str, Tensor]]:
        """FlowGRPO on the policy's own samples; the LoRA after each update, the last one in place."""
        problem, estimator = self.problem, estimands()["flow_grpo"]
        lora = problem.lora()
        optimizer = torch.optim.Adam(list(lora.values()), lr=LEARNING_RATE)
        versions = []
        for index in range(MOVES):
            batch, rewards = problem.rollout(Sampler(network=problem.network), index, "move")
            found = problem.evaluate(batch)
            slope, _, _ = estimator.slopes(estimator.settle(batch, found), rewards, found)
            gradient = problem.pull_back(batch, found.log_prob_slope, slope.unsqueeze(0))[0]
            for parameter, part in zip(lora.values(), gradient.split([p.numel() for p in lora.values()]), strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            problem.load(lora)
            versions.append(problem.lora())
        return versions

    def sampler(self, mismatch: str) -> Sampler:
        """What samples in place of the policy."""
        kind, _, age = mismatch.partition("_")
        if kind == "guidance":
            return Sampler(network=self.problem.replica(), guidance=1.01 * GUIDANCE)
        if kind == "stale":
            self.problem.load(self.versions[-1 - int(age)])
            older = self.problem.replica()
            self.problem.load(self.versions[-1])
            return Sampler(network=older)
        quantization = None if kind == "bf16" else kind
        return Sampler(network=self.problem.replica(dtype=torch.bfloat16, quantization=quantization))

    def pairs(self, sampler: Sampler, count: int) -> list[Pair]:
        """Batches for calibration, apart from those of the study."""
        batches = [self.problem.rollout(sampler, index, "calibration")[0] for index in range(count)]
        return [(batch, self.problem.evaluate(batch)) for batch in batches]

    def gradients(self, sampler: Sampler, given: Mapping[str, Estimator]) -> tuple[dict[str, Gradients], Tensor]:
        """Of every estimator on the same batches; and that of the mean KL from the rollout [M, P]."""
        rows, metrics = [], {name: [] for name in given}
        for index in range(self.batches):
            batch, rewards = self.problem.rollout(sampler, index, "study")
            found = self.problem.evaluate(batch)
            order = torch.randperm(len(rewards), generator=generator(SEED, index, "chance"))
            both, both_found, dealt = _twice(batch), _twice_found(found), torch.cat([rewards, rewards[order]])
            at_log_prob, at_kl = [], []
            for name, estimator in given.items():
                settled = estimator.settle(both, both_found)
                slope, kl_slope, measured = estimator.slopes(settled, dealt, both_found)
                at_log_prob += list(2 * slope.unflatten(0, (2, -1)))
                at_kl += list(2 * kl_slope.unflatten(0, (2, -1)))
                metrics[name].append(_shown(measured, settled, at_log_prob[-2], rewards))
            row = self.problem.pull_back(batch, found.log_prob_slope, torch.stack(at_log_prob))
            with_kl = [i for i, one in enumerate(at_kl) if one.any()]
            mean = torch.full_like(found.log_probs, 1 / found.log_probs.numel())
            by_kl = self.problem.pull_back(batch, found.kl_slope, torch.stack([*(at_kl[i] for i in with_kl), mean]))
            row[with_kl] += by_kl[:-1]
            rows.append(torch.cat([row, by_kl[-1:]]))
        columns = torch.stack(rows, 1)
        pairs = zip(given, columns[:-1].unflatten(0, (-1, 2)), strict=True)
        return {name: Gradients(one[0], one[1], metrics[name]) for name, one in pairs}, columns[-1]


def _twice(batch: DiffusionBatch) -> DiffusionBatch:
    """Every sample twice, in groups of their own: one loss serves the rewards and the rewards dealt out at random."""
    doubled = batch.select(torch.arange(len(batch)).repeat(2))
    return doubled.replace(group=torch.cat([batch.group, batch.group + PROMPTS]))


def _twice_found(found: Evaluation) -> Evaluation:
    gaussian = GaussianSteps(*(torch.cat([part, part]) for part in found.gaussian))
    return Evaluation(torch.cat([found.log_probs] * 2), gaussian, *(torch.cat([part] * 2) for part in found[2:]))


def _shown(measured: Mapping[str, float], settled: DiffusionBatch, slope: Tensor, rewards: Tensor) -> dict[str, Any]:
    """What the package reports, and the share of |advantage| whose log-prob has no slope, in all and by step."""
    centred = rewards - rewards.view(-1, SAMPLES).mean(1).repeat_interleave(SAMPLES)
    size = centred.abs().unsqueeze(1).expand_as(slope)
    gated = torch.where(slope == 0, size, 0.0).sum(0) / size.sum(0)
    mask, weights = settled.rejection_mask, settled.rollout_is_weights
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


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<E a, E b> from rows [M, P] that are independent of each other, without the bias of their noise."""
    count = len(a)
    return (a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1))


def spread(a: Tensor) -> Tensor:
    """Trace of the covariance of rows [M, P]."""
    return ((a - a.mean(0)) ** 2).sum() / (len(a) - 1)


def summary(reward: Tensor, chance: Tensor, truth: Gradients, pull: Tensor) -> dict[str, Tensor]:
    """Of rows [M, P], in units of the true gradient.

    bias: |E g - truth|; length: the component of E g along the truth; cosine: between them; variance: of one batch's
    gradient, over that of an on-policy one; chance: |E g| where rewards are dealt out at random, so that it ought to
    be 0; to_rollout: cosine of that gradient with the KL's from the rollout (1: it pulls the policy to the rollout's).
    """
    true, drift = truth.reward, chance - truth.chance
    square = inner(true, true)
    own = inner(reward, reward).clamp(min=0)
    drift_square = inner(drift, drift).clamp(min=0)
    pull_square = inner(pull, pull).clamp(min=0)
    return {
        "bias": (inner(reward - true, reward - true).clamp(min=0) / square).sqrt(),
        "length": inner(reward, true) / square,
        "cosine": inner(reward, true) / (own * square).sqrt(),
        "variance": spread(reward) / spread(true),
        "chance": (drift_square / square).sqrt(),
        "to_rollout": inner(drift, pull) / (drift_square * pull_square).sqrt(),
    }


def with_errors(one: Gradients, truth: Gradients, pull: Tensor) -> dict[str, list[float] | float]:
    """Each quantity with its standard error, by leaving out blocks of batches in turn; and the mean metrics."""
    batches = torch.arange(len(pull))
    blocks = min(BLOCKS, len(batches))

    def of(kept: Tensor) -> dict[str, Tensor]:
        part = Gradients(truth.reward[kept], truth.chance[kept], [])
        return summary(one.reward[kept], one.chance[kept], part, pull[kept])

    left_out = [of(batches[batches % blocks != block]) for block in range(blocks)]
    found = {}
    for name, value in of(batches).items():
        values = torch.stack([part[name] for part in left_out])
        error = ((values - values.mean()) ** 2).sum().mul((blocks - 1) / blocks).sqrt()
        found[name] = [value.item(), error.item()] if torch.isfinite(value) else None
    return {**found, **{name: _mean([row[name] for row in one.metrics]) for name in one.metrics[0]}}


def _mean(values: Sequence[Any]) -> Any:
    return torch.tensor(values, dtype=torch.float64).mean(0).tolist()


def run_cell(study: Study, mismatch: str) -> Cell:
    start, sampler = time.process_time(), study.sampler(mismatch)
    pairs = study.pairs(sampler, 4)
    seen = calibrate(pairs)
    given = estimators(seen, pairs)
    found, pull = study.gradients(sampler, given)
    return {
        **_head(study),
        "mismatch": mismatch,
        "calibration": seen._asdict(),
        "estimators": {name: with_errors(one, study.truth[given[name].estimand], pull) for name, one in found.items()},
        "cpu_seconds": round(time.process_time() - start),
    }


def truth_cell(study: Study) -> Cell:
    """How well the truth itself is known, and how Guard's differs from FlowGRPO's."""
    flow, guard = study.truth["flow_grpo"].reward, study.truth["grpo_guard"].reward
    square, noise = inner(flow, flow), spread(flow)
    reward = [
        study.problem.rollout(Sampler(network=study.problem.network), index, "study")[1].mean() for index in range(8)
    ]
    return {
        **_head(study),
        "relative_error": (noise / len(flow) / square).sqrt().item(),
        "batch_noise": (noise / square).sqrt().item(),
        "guard_cosine": (inner(guard, flow) / (inner(guard, guard) * square).sqrt()).item(),
        "mean_reward": torch.stack(reward).mean().item(),
    }


def _head(study: Study) -> Cell:
    size = study.problem.elements
    return {"seed": SEED, "elements": size, "batches": study.batches, "samples_per_batch": PROMPTS * SAMPLES}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small cells, to see that it runs")
    parser.add_argument("--batches", type=int, default=32, help="of 1,024 samples, for each cell")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = {MAIN: MISMATCHES, **dict.fromkeys(OTHERS, ELSEWHERE)}
    fit, folder = None, options.output
    if options.quick:
        plan, options.batches, fit = {16: ("bf16",)}, 4, 50
    for elements, mismatches in plan.items():
        missing = [name for name in ("truth", *mismatches) if not (folder / STUDY / f"{name}_{elements}.json").exists()]
        if not missing:
            continue
        study = Study(elements, options.batches, fit)
        for name in missing:
            cell = truth_cell(study) if name == "truth" else run_cell(study, name)
            save(STUDY, f"{name}_{elements}", cell, folder)
            print(f"{name}_{elements}", flush=True)


if __name__ == "__main__":
    main()

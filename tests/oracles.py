"""Independent formulas for the tests: scalars, loops and 50-digit decimals instead of tensors.

Written from the reference documents, not from the code. `difference` and the log-probs are nested lists [B][T] of
floats, `valid` a nested list of bools. Sequences without a valid step take no part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.correction.correct import Correction, correct
from flowgrpo_rc.losses.base import DiffusionLossConfig, LossConfig

Rows = Sequence[Sequence[float]]
Valid = Sequence[Sequence[bool]]

SAFETY = 20
CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


# One reverse step ---------------------------------------------------------------------------------------------------


def reverse_step(
    kind: str, x: float, v: float, sigma: float, sigma_next: float, noise: float, second: float
) -> tuple[float, float]:
    """(mean, std) of one latent element. `second` is the second entry of the schedule."""
    dt = sigma_next - sigma
    if kind == "sde":
        s = noise * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
        mean = x * (1 + s * s * dt / (2 * sigma)) + v * (1 + s * s * (1 - sigma) / (2 * sigma)) * dt
        return mean, s * math.sqrt(-dt)
    x0 = x - sigma * v
    if kind == "dance_sde":
        mean = x + v * dt + 0.5 * noise**2 * (x - x0 * (1 - sigma)) / sigma**2 * dt
        return mean, noise * math.sqrt(-dt)
    s = sigma_next * math.sin(noise * math.pi / 2)
    x1 = x + (1 - sigma) * v
    return x0 * (1 - sigma_next) + x1 * math.sqrt(sigma_next**2 - s**2), s


def kl_scale(kind: str, sigma: float, sigma_next: float, noise: float, second: float) -> float:
    """The s of the reference KL mean_D[(mean - reference)^2] / (2 s^2): the coefficient, without dt."""
    if kind == "sde":
        return noise * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    return noise if kind == "dance_sde" else sigma_next * math.sin(noise * math.pi / 2)


# Correction ---------------------------------------------------------------------------------------------------------


def exp(value: Decimal | float) -> Decimal:
    with localcontext(prec=50):
        return Decimal(value).exp()


def estimate(name: str, difference: float) -> Decimal:
    """k1 is the log-ratio training - rollout itself, so that its band is one on the ratio training / rollout."""
    x = Decimal(difference)
    with localcontext(prec=50):
        return {"k1": x, "k2": x * x / 2, "k3": x.exp() - 1 - x}[name]


def chosen(row: Sequence[Any], valid: Sequence[bool]) -> list[Any]:
    return [value for value, holds in zip(row, valid, strict=True) if holds]


def statistic(criterion: str, difference: Rows, valid: Valid) -> list[list[float]]:
    """The criterion's value at every step [B][T]; 0 for a sequence without a valid step."""
    level, estimator = criterion.rsplit("_", 1)
    rows = []
    for row, holds in zip(difference, valid, strict=True):
        values = [estimate(estimator, value) if ok else Decimal(0) for value, ok in zip(row, holds, strict=True)]
        inside = chosen(values, holds) or [Decimal(0)]
        if level != "token":
            whole = {"seq_sum": sum(inside), "seq_mean": sum(inside) / len(inside), "seq_max": max(inside)}[level]
            values = [whole] * len(row)
        rows.append([float(value) for value in values])
    return rows


def kept(criterion: str, lower: float, upper: float, difference: Rows, valid: Valid) -> list[list[bool]]:
    """Valid steps whose statistic is in the band. For k1 the band is one on exp(statistic), otherwise on itself."""
    ratio = criterion.endswith("k1")
    return [
        [ok and lower <= (float(exp(value)) if ratio else value) <= upper for value, ok in zip(row, holds, strict=True)]
        for row, holds in zip(statistic(criterion, difference, valid), valid, strict=True)
    ]


def log_weights(level: str, difference: Rows, valid: Valid) -> list[list[Decimal]]:
    """The log-ratio of each step, or of the whole sequence repeated over its steps; no bound yet."""
    if level == "token":
        pairs = zip(difference, valid, strict=True)
        return [[Decimal(value) if ok else Decimal(0) for value, ok in zip(*pair, strict=True)] for pair in pairs]
    inside = [chosen(row, ok) for row, ok in zip(difference, valid, strict=True)]
    totals = [sum((Decimal(value) for value in row), Decimal(0)) for row in inside]
    return [[total] * len(row) for total, row in zip(totals, difference, strict=True)]


def weights(level: str, upper: float, difference: Rows, valid: Valid) -> list[list[float]]:
    """min(exp(clamp(log-ratio, +-20)), upper), 0 at steps that are not valid."""
    logs = log_weights(level, difference, valid)
    bounded = [[max(min(x, Decimal(SAFETY)), Decimal(-SAFETY)) for x in row] for row in logs]
    return [
        [min(float(exp(value)), upper) if ok else 0.0 for value, ok in zip(row, holds, strict=True)]
        for row, holds in zip(bounded, valid, strict=True)
    ]


def normaliser(level: str, values: Rows, valid: Valid) -> float:
    """The mean of batch normalisation: over valid tokens, or over sequences."""
    per_row = [chosen(row, holds) for row, holds in zip(values, valid, strict=True)]
    if level == "token":
        return mean([value for row in per_row for value in row])
    return mean([mean(row) for row in per_row if row])


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Of the population."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def metrics(training: Rows, rollout: Rows, valid: Valid, keep: Valid, *, level: str, upper: float) -> dict[str, float]:
    """Every documented metric for log-probs that are finite at the valid steps."""
    difference = [[t - r for t, r in zip(*pair, strict=True)] for pair in zip(training, rollout, strict=True)]
    flat = [value for row, ok in zip(difference, valid, strict=True) for value in chosen(row, ok)]
    rows = [(chosen(t, ok), chosen(r, ok)) for t, r, ok in zip(training, rollout, valid, strict=True) if any(ok)]
    training_ppl = [-mean(t) for t, _ in rows]
    rollout_ppl = [-mean(r) for _, r in rows]
    ppl_diff = [r - t for t, r in zip(training_ppl, rollout_ppl, strict=True)]
    after = weights(level, upper, difference, valid)
    before = weights(level, math.inf, difference, valid)
    logs = log_weights(level, difference, valid)
    w = [value for row, ok in zip(after, valid, strict=True) for value in chosen(row, ok)]
    log_w = [float(value) for row, ok in zip(logs, valid, strict=True) for value in chosen(row, ok)]
    seq = [mean(chosen(row, ok)) for row, ok in zip(after, valid, strict=True) if any(ok)]
    seq_before = [mean(chosen(row, ok)) for row, ok in zip(before, valid, strict=True) if any(ok)]
    rejected = [[v and not k for v, k in zip(*pair, strict=True)] for pair in zip(valid, keep, strict=True)]
    step_fraction = mean([float(x) for row, ok in zip(rejected, valid, strict=True) for x in chosen(row, ok)])
    seq_fraction = mean([float(any(row)) for row, ok in zip(rejected, valid, strict=True) if any(ok)])
    sums = [sum(chosen(row, ok)) for row, ok in zip(difference, valid, strict=True) if any(ok)]
    return {
        "training_log_ppl": mean(training_ppl),
        "training_ppl": mean([math.exp(x) for x in training_ppl]),
        "rollout_log_ppl": mean(rollout_ppl),
        "rollout_ppl": mean([math.exp(x) for x in rollout_ppl]),
        "log_ppl_diff": mean(ppl_diff),
        "log_ppl_abs_diff": mean([abs(x) for x in ppl_diff]),
        "log_ppl_diff_max": max(ppl_diff),
        "log_ppl_diff_min": min(ppl_diff),
        "ppl_ratio": math.exp(mean([t - r for t, r in zip(training_ppl, rollout_ppl, strict=True)])),
        "kl": mean([-x for x in flat]),
        "k3_kl": mean([float(estimate("k3", x)) for x in flat]),
        "chi2_token": mean([float(exp(2 * Decimal(x)) - 1) for x in flat]),
        "chi2_seq": mean([float(exp(2 * Decimal(x)) - 1) for x in sums]),
        "logprob_abs_diff_mean": mean([abs(x) for x in flat]),
        "logprob_abs_diff_max": max(abs(x) for x in flat),
        "rollout_is_mean": mean(w),
        "rollout_is_std": std(w),
        "rollout_is_min": min(w),
        "rollout_is_max": max(w),
        "rollout_is_eff_sample_size": 1 / mean([(x / mean(w)) ** 2 for x in w]),
        "rollout_is_ratio_fraction_high": mean([float(x > math.log(upper)) for x in log_w]),
        "rollout_is_ratio_fraction_low": mean([float(x < -math.log(upper)) for x in log_w]),
        "rollout_is_seq_mean": mean(seq),
        "rollout_is_seq_std": std(seq),
        "rollout_is_seq_min": min(seq),
        "rollout_is_seq_max": max(seq),
        "rollout_is_seq_max_deviation": max(abs(x - 1) for x in seq),
        "rollout_is_seq_fraction_high": mean([float(x > upper) for x in seq_before]),
        "rollout_is_seq_fraction_low": mean([float(x < 1 / upper) for x in seq_before]),
        "rollout_is_masked_fraction": step_fraction,
        "rollout_is_seq_masked_fraction": seq_fraction,
        "rollout_rs_masked_fraction": step_fraction,
        "rollout_rs_seq_masked_fraction": seq_fraction,
        "rollout_rs_nonfinite_fraction": 0.0,
        "rollout_is_veto_fraction": 0.0,
    }


# Losses -------------------------------------------------------------------------------------------------------------


def ppo(log_probs: Tensor, anchor: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(r A, clip(r) A) for every step, float64, written out by case so that autograd sees one branch only."""
    rows = []
    for now, old, advantage in zip(log_probs.flatten(), anchor.flatten(), advantages.flatten(), strict=True):
        ratio = torch.exp(now - old)
        held = advantage * min(max(ratio.item(), 1 - clip), 1 + clip)
        free = advantage * ratio
        rows.append(-(free if free.item() <= held.item() else held + 0 * now))
    return torch.stack(rows).reshape(log_probs.shape)


# Batches and processes ----------------------------------------------------------------------------------------------


MASKS = {
    "full": [[1, 1, 1, 1]] * 6,
    "right": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]],
    "empty": [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]],
}
LEVELS = ("token", "sequence")
DEFAULTS = {"rollout_is": None, "rollout_is_threshold": 2.0, "batch_normalize": False, "bands": ()}


def log_probs(scale: float = 0.5, seed: int = 0, shape: tuple[int, int] = (6, 4)) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    rollout = torch.randn(shape, generator=source, dtype=torch.float64)
    return rollout + scale * torch.randn(shape, generator=source, dtype=torch.float64), rollout


def mask_of(name: str) -> Tensor:
    return torch.tensor(MASKS[name], dtype=torch.bool)


def correct_with_defaults(training: Tensor, rollout: Tensor, mask: Tensor, **settings) -> Correction:
    return correct(training, rollout, mask, **DEFAULTS | settings)


def diffusion_batch(
    rollout_log_probs: Tensor | None, *, shape: tuple[int, int] | None = None, **fields: Any
) -> DiffusionBatch:
    """A batch [B, T] with log-probs that matter and everything else small and constant."""
    num_samples, num_steps = rollout_log_probs.shape if rollout_log_probs is not None else shape
    spec = SamplerSpec(
        height=8,
        width=8,
        num_inference_steps=num_steps + 1,
        guidance_scale=1.0,
        noise_level=0.7,
        sde_type="sde",
        log_prob_convention="gaussian",
        max_sequence_length=4,
        dtype="fp32",
    )
    index = torch.arange(num_samples)
    return DiffusionBatch(
        spec=spec,
        all_latents=torch.zeros(num_samples, num_steps + 1, 2),
        all_timesteps=torch.zeros(num_samples, num_steps),
        step_indices=torch.arange(num_steps).expand(num_samples, -1),
        sigmas=torch.linspace(1, 0, num_steps + 2),
        conditioning=Conditioning(embeds=torch.zeros(1, 1, 1)),
        prompt_index=torch.zeros(num_samples, dtype=torch.int64),
        group=index // 2,
        seed=index,
        policy_version=torch.zeros(num_samples, dtype=torch.int64),
        rollout_log_probs=rollout_log_probs,
        **fields,
    )


def loss_config(correction: Any, *, clip: float = 0.1, adv_clip: float = 5.0) -> LossConfig:
    settings = DiffusionLossConfig(clip_ratio=clip, adv_clip_max=adv_clip)
    return LossConfig(diffusion_loss=settings, rollout_correction=correction)


def on_shards(count: int, work: Callable[[int, Mapping[str, Callable[[Tensor], Tensor]]], Any]) -> list[Any]:
    """work(rank, reduce) on `count` threads; reduce["sum"] and reduce["max"] really combine across them."""
    barrier = threading.Barrier(count, timeout=20)
    posted: list[Tensor] = [torch.empty(0)] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def reducer(rank: int, combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def reduce(value: Tensor) -> Tensor:
            posted[rank] = value
            barrier.wait()
            together = combine(torch.stack(posted))
            barrier.wait()
            return together

        return reduce

    def run(rank: int) -> None:
        reduce = {"sum": reducer(rank, lambda x: x.sum(0)), "max": reducer(rank, lambda x: x.amax(0))}
        try:
            results[rank] = work(rank, reduce)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

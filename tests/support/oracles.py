"""Independent formulas for the tests: scalars, loops and 50-digit decimals instead of tensors.

Written from the reference documents, not from the code. Log-probs are nested lists [B][T] of
floats, masks nested lists of bools. Sequences without a valid step take no part, and neither does a
step whose difference is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = Sequence[Sequence[float]]
Valid = Sequence[Sequence[bool]]

SAFETY = 20
CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask", "icepop")


# --- One reverse step


def reverse_step(
    kind: str, x: float, v: float, sigma: float, sigma_next: float, noise: float, second: float
) -> tuple[float, float]:
    """Returns (mean, std) of one latent element. `second` is the second entry of the schedule."""
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
    """Returns the s of the reference KL mean_D[(mean - reference)^2] / (2 s^2), without dt."""
    if kind == "sde":
        return noise * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    return noise if kind == "dance_sde" else sigma_next * math.sin(noise * math.pi / 2)


# --- Correction


class Rule(NamedTuple):
    """A correction in plain numbers. bands: (criterion, lower, upper); bounds of k1 are on the
    ratio.
    """

    level: str | None = None
    mode: str = "truncate"
    lower: float = 0.0
    upper: float = 2.0
    bands: tuple[tuple[str, float, float], ...] = ()
    veto: float | None = None
    normalise: bool = False
    over_kept: bool = False


class Expected(NamedTuple):
    """weights [B][T] or None, kept [B][T], metrics by name."""

    weights: list[list[float]] | None
    kept: list[list[bool]]
    metrics: dict[str, float]


@cache
def exp(value: Decimal) -> Decimal:
    with localcontext(prec=50):
        return value.exp()


def estimate(name: str, difference: float) -> float:
    """k1 = -log(ratio), k2 = log(ratio)^2 / 2, k3 = ratio - 1 - log(ratio)."""
    x = Decimal(difference)
    with localcontext(prec=50):
        return float({"k1": -x, "k2": x * x / 2, "k3": exp(x) - 1 - x}[name])


def ratio(difference: float, most: float = math.inf, least: float = -math.inf) -> float:
    return float(exp(Decimal(min(max(difference, least), most))))


def squared_ratio_minus_one(difference: float) -> float:
    with localcontext(prec=50):
        return float(exp(2 * Decimal(min(max(difference, -SAFETY), SAFETY))) - 1)


def chosen(row: Sequence[Any], valid: Sequence[bool]) -> list[Any]:
    return [value for value, holds in zip(row, valid, strict=True) if holds]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], lost: int = 0) -> float:
    """Returns the deviation of the population, or of a sample with lost=1 (0 for a single
    value).
    """
    centre = mean(values)
    count = len(values) - lost
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / count) if count else 0.0


def cells(function: Callable[..., Any], *tables: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Applies a function to the cells of tables [B][T] that stand in the same place."""
    rows = zip(*tables, strict=True)
    return [[function(*cell) for cell in zip(*row, strict=True)] for row in rows]


def subtract(training: Rows, rollout: Rows) -> list[list[float]]:
    return cells(lambda t, r: t - r, training, rollout)


def finite_steps(difference: Rows, mask: Valid) -> list[list[bool]]:
    return cells(lambda x, ok: ok and math.isfinite(x), difference, mask)


def statistic(criterion: str, row: Sequence[float]) -> list[float]:
    """Returns the criterion at each valid step of one sequence (the same for sequence criteria)."""
    level, estimator = criterion.rsplit("_", 1)
    values = [estimate(estimator, x) for x in row]
    if level == "token" or not values:
        return values
    whole = {"seq_sum": math.fsum(values), "seq_mean": mean(values), "seq_max": max(values)}[level]
    return [whole] * len(values)


def in_space_of_statistic(criterion: str, lower: float, upper: float) -> tuple[float, float]:
    """lower <= ratio <= upper is -log(upper) <= k1 <= -log(lower); k2 and k3 only have an upper
    bound.
    """
    if not criterion.endswith("k1"):
        return -math.inf, upper
    return -math.log(upper), -math.log(lower) if lower > 0 else math.inf


def kept(
    criterion: str, lower: float, upper: float, difference: Rows, mask: Valid
) -> list[list[bool]]:
    """Returns the steps that one criterion keeps.

    A sequence criterion keeps no sequence with a step that is not finite.
    """
    low, high = in_space_of_statistic(criterion, lower, upper)
    result = []
    for row, exists in zip(difference, mask, strict=True):
        ok = finite_steps([row], [exists])[0]
        values = iter(statistic(criterion, chosen(row, ok)))
        sound = criterion.startswith("token") or ok == list(exists)
        result.append([here and low <= next(values) <= high and sound for here in ok])
    return result


def log_weights(level: str, row: Sequence[float]) -> list[float]:
    """Returns the log of the weight at each valid step of one sequence, unbounded."""
    if level == "token" or not row:
        return list(row)
    total = math.fsum(row)
    return [total if level == "sequence" else total / len(row)] * len(row)


def after_bounds(rule: Rule, weight: float) -> float:
    if rule.mode == "truncate":
        return min(weight, rule.upper)
    if rule.mode == "clip":
        return min(max(weight, rule.lower), rule.upper)
    return 0.0 if rule.mode == "icepop" and not rule.lower <= weight <= rule.upper else weight


def spread(values: Sequence[Sequence[float]], valid: Valid) -> list[list[float]]:
    """Puts values of the valid steps back among the others, which are 0."""
    rows = [iter(row) for row in values]
    return [[next(row) if ok else 0.0 for ok in oks] for row, oks in zip(rows, valid, strict=True)]


def correction(training: Rows, rollout: Rows, mask: Valid, rule: Rule) -> Expected:
    """Returns all that the documents say about one batch."""
    difference = subtract(training, rollout)
    valid = finite_steps(difference, mask)
    rows = [chosen(row, ok) for row, ok in zip(difference, valid, strict=True)]
    logs = [log_weights(rule.level or "token", row) for row in rows]
    raw = [[ratio(x, SAFETY, -SAFETY) for x in row] for row in logs]
    used = [[after_bounds(rule, w) for w in row] for row in raw]
    keep = [list(row) for row in valid]
    for criterion, lower, upper in rule.bands:
        keep = both(keep, kept(criterion, lower, upper, difference, mask))
    if rule.level is not None and rule.mode == "mask":
        inside = [[rule.lower <= w <= rule.upper for w in row] for row in raw]
        keep = both(keep, [[bool(x) for x in row] for row in spread(inside, valid)])
    below = catastrophic(difference, mask, rule.veto)
    keep = [[k and not any(low) for k in row] for row, low in zip(keep, below, strict=True)]
    values = divergences(training, rollout, valid) | weight_metrics(rule, logs, raw, used)
    for band in rule.bands:
        values |= band_metrics(band, rows, kept(*band, difference, mask), valid)
    values |= rejection_metrics(mask, valid, keep, below)
    if rule.level is None:
        return Expected(None, keep, values)
    weights = spread(used, valid)
    factor = 1.0
    if rule.normalise:
        factor = normaliser(rule.level, weights, keep if rule.over_kept else valid)
        values["rollout_is_batch_norm_factor"] = factor
    return Expected([[w / factor for w in row] for row in weights], keep, values)


def both(one: Valid, other: Valid) -> list[list[bool]]:
    return cells(lambda a, b: a and b, one, other)


def catastrophic(difference: Rows, mask: Valid, veto: float | None) -> list[list[bool]]:
    """Returns steps whose unbounded ratio is below the veto, or whose training log-prob is -inf."""
    limit = -math.inf if veto is None else math.log(veto)
    return cells(lambda x, ok: ok and x < limit, difference, mask)


def normaliser(level: str, values: Rows, counted: Valid) -> float:
    """Returns the mean of batch normalisation, over counted tokens or over sequences that have
    one; 1 for a mean of 0.
    """
    per_row = [chosen(row, holds) for row, holds in zip(values, counted, strict=True)]
    found = (
        [w for row in per_row for w in row]
        if level == "token"
        else [mean(row) for row in per_row if row]
    )
    centre = mean(found) if found else 0.0
    return centre if centre > 1e-8 else 1.0


def divergences(training: Rows, rollout: Rows, valid: Valid) -> dict[str, float]:
    rows = [
        (chosen(t, ok), chosen(r, ok))
        for t, r, ok in zip(training, rollout, valid, strict=True)
        if any(ok)
    ]
    if not rows:
        return {}
    differences = [subtract([t], [r])[0] for t, r in rows]
    flat = [x for row in differences for x in row]
    training_ppl, rollout_ppl = ([-mean(pair[side]) for pair in rows] for side in (0, 1))
    ppl_diff = [-mean(row) for row in differences]
    return {
        "training_log_ppl": mean(training_ppl),
        "training_ppl": mean([math.exp(x) for x in training_ppl]),
        "rollout_log_ppl": mean(rollout_ppl),
        "rollout_ppl": mean([math.exp(x) for x in rollout_ppl]),
        "log_ppl_diff": mean(ppl_diff),
        "log_ppl_abs_diff": mean([abs(x) for x in ppl_diff]),
        "log_ppl_diff_max": max(ppl_diff),
        "log_ppl_diff_min": min(ppl_diff),
        "ppl_ratio": mean([ratio(x) for x in ppl_diff]),
        "kl": mean([-x for x in flat]),
        "k3_kl": mean([estimate("k3", x) for x in flat]),
        "chi2_token": mean([squared_ratio_minus_one(x) for x in flat]),
        "chi2_seq": mean([squared_ratio_minus_one(math.fsum(row)) for row in differences]),
        "logprob_abs_diff_mean": mean([abs(x) for x in flat]),
        "logprob_abs_diff_max": max(abs(x) for x in flat),
    }


def weight_metrics(rule: Rule, logs: Rows, raw: Rows, used: Rows) -> dict[str, float]:
    """Returns metrics of the weights at valid steps, row by row.

    `logs` are unbounded, `raw` safety-bounded, `used` after the mode.
    """
    logs, raw, used = ([row for row in rows if row] for rows in (logs, raw, used))
    if not logs:
        return {}
    per_step = rule.level in (None, "token")
    flat_raw, flat_used = ([w for row in rows for w in row] for rows in (raw, used))
    unbounded = [min(ratio(row[0]), math.exp(SAFETY)) for row in logs]
    judged, extremes = (flat_raw, flat_used) if per_step else ([row[0] for row in raw], unbounded)
    lower = 1 / rule.upper if rule.mode == "truncate" else rule.lower
    seq_used = [mean(row) for row in used]
    seq_raw = [mean(row) for row in raw]
    centre = mean(flat_used)
    values = {
        "rollout_is_mean": centre,
        "rollout_is_raw_mean": mean(flat_raw),
        "rollout_is_std": std(flat_used),
        "rollout_is_eff_sample_size": 1 / mean([(w / centre) ** 2 for w in flat_used])
        if centre
        else 0.0,
        "rollout_is_max": max(extremes),
        "rollout_is_min": min(extremes),
        "rollout_is_ratio_fraction_high": mean([w > rule.upper for w in judged]),
        "rollout_is_ratio_fraction_low": mean([w < lower for w in judged]),
        "rollout_is_seq_mean": mean(seq_used),
        "rollout_is_seq_std": std(seq_used, lost=1),
        "rollout_is_seq_max": max(seq_used),
        "rollout_is_seq_min": min(seq_used),
        "rollout_is_seq_max_deviation": max(abs(w - 1) for w in seq_used),
        "rollout_is_seq_fraction_high": mean([w > rule.upper for w in seq_raw]),
        "rollout_is_seq_fraction_low": mean([w < lower for w in seq_raw]),
    }
    if rule.mode != "truncate":
        values["rollout_is_oob_ratio"] = mean([not rule.lower <= w <= rule.upper for w in flat_raw])
    return values


def band_metrics(
    band: tuple[str, float, float], rows: Rows, keeps: Valid, valid: Valid
) -> dict[str, float]:
    """Returns metrics of one criterion.

    `rows` holds the differences of the valid steps, `keeps` what the criterion keeps.
    """
    criterion, low, high = band[0], *in_space_of_statistic(*band)
    values = [statistic(criterion, row) for row in rows if row]
    if not values:
        return {}
    outside = [
        [not k for k in chosen(keep, ok)] for keep, ok in zip(keeps, valid, strict=True) if any(ok)
    ]
    flat = [x for row in values for x in row]
    judged = flat if criterion.startswith("token") else [row[0] for row in values]
    per_sequence = [mean(row) for row in values]
    found = {
        "mean": mean(flat),
        "std": std([min(max(x, low), high) for x in flat]),
        "max": max(judged),
        "min": min(judged),
        "fraction_high": mean([x > high for x in judged]),
        "fraction_low": mean([x < low for x in judged]),
        "masked_fraction": mean([x for row in outside for x in row]),
        "seq_masked_fraction": mean([any(row) for row in outside]),
        "seq_mean": mean(per_sequence),
        "seq_std": std(per_sequence, lost=1),
        "seq_max": max(per_sequence),
        "seq_min": min(per_sequence),
        "seq_max_deviation": max(abs(x) for x in per_sequence),
        "seq_fraction_high": mean([x > high for x in per_sequence]),
        "seq_fraction_low": mean([x < low for x in per_sequence]),
    }
    return {f"rollout_rs_{criterion}_{name}": value for name, value in found.items()}


def rejection_metrics(mask: Valid, valid: Valid, keep: Valid, below: Valid) -> dict[str, float]:
    """Returns fractions of the existing steps, and of the sequences that have one."""
    exists = [row for row in mask if any(row)]
    if not exists:
        return {}
    rejected, broken, vetoed = (
        [chosen(row, ok) for row, ok in zip(rows, mask, strict=True) if any(ok)]
        for rows in (
            [[not k for k in row] for row in keep],
            [[not v for v in row] for row in valid],
            below,
        )
    )
    of_steps = mean([x for row in rejected for x in row])
    of_sequences = mean([any(row) for row in rejected])
    return {
        "rollout_is_masked_fraction": of_steps,
        "rollout_is_seq_masked_fraction": of_sequences,
        "rollout_rs_masked_fraction": of_steps,
        "rollout_rs_seq_masked_fraction": of_sequences,
        "rejected_ratio": of_sequences,
        "rollout_rs_nonfinite_fraction": mean([x for row in broken for x in row]),
        "rollout_is_veto_fraction": mean([any(row) for row in vetoed]),
        "rollout_is_catastrophic_token_fraction": mean([x for row in vetoed for x in row]),
    }


# --- Losses


class Clip(NamedTuple):
    """The PPO band 1 - low .. 1 + high and the bound of the dual clip."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


def clipped(ratio: Tensor, advantage: float, clip: Clip) -> Tensor:
    """Computes -min(r A, clip(r) A) of one ratio, at most -A c for A < 0.

    It goes by case, so that autograd sees one branch.
    """
    value = ratio.item()
    if advantage >= 0:
        held = 1 + clip.high if value > 1 + clip.high else None
    else:
        held = 1 - clip.low if value < 1 - clip.low else None
        held = clip.dual if clip.dual is not None and value > clip.dual else held
    return -advantage * (ratio if held is None else held + 0 * ratio)


def ppo(now: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """The clipped loss of every step [B, T]."""
    triples = zip(now.flatten(), old.flatten(), advantages.flatten().tolist(), strict=True)
    return torch.stack([clipped(torch.exp(n - o), a, clip) for n, o, a in triples]).reshape(
        now.shape
    )


def gspo(now: Tensor, old: Tensor, advantages: Sequence[float], kept: Valid, clip: Clip) -> Tensor:
    """Returns the mean over sequences of the clipped loss of s = exp(mean log-ratio).

    Sequences without a kept step take no part.
    """
    losses = []
    for row in range(len(now)):
        steps = [t for t, ok in enumerate(kept[row]) if ok]
        if steps:
            log_ratio = sum((now[row, t] - old[row, t] for t in steps), torch.zeros(())) / len(
                steps
            )
            losses.append(clipped(torch.exp(log_ratio), advantages[row], clip))
    return torch.stack(losses).mean()


def aggregate(values: Tensor, kept: Valid, counted: Valid, mode: str) -> Tensor:
    """Aggregates the loss of kept steps in a mean over counted ones.

    A sequence without a counted step is none.
    """
    rows = []
    for row, (keep, count) in enumerate(zip(kept, counted, strict=True)):
        if any(count):
            total = sum(
                (values[row, t] for t, ok in enumerate(keep) if ok),
                torch.zeros((), dtype=values.dtype),
            )
            rows.append((total, sum(count)))
    totals = [total / (count if mode == "seq-mean-token-mean" else 1) for total, count in rows]
    number = sum(count for _, count in rows) if mode == "token-mean" else len(rows)
    return torch.stack(totals).sum() / number if rows else torch.zeros((), dtype=values.dtype)

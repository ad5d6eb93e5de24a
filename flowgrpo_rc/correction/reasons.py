"""Reasons for a rejection, in the words of the settings: for people, on a few rows."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.correction.config import Rules
from flowgrpo_rc.correction.log_ratios import LogRatios, compute_log_ratios
from flowgrpo_rc.correction.rejection import statistic
from flowgrpo_rc.correction.thresholds import Band
from flowgrpo_rc.correction.weights import outside, weigh


class Reason(NamedTuple):
    """A criterion that does not keep a row."""

    criterion: str
    value: float  # its statistic; for k1 the ratio training / rollout
    lower: float | None = None  # the least value that is kept; None for no bound, and for `auto`
    upper: float | None = None  # the largest value that is kept; likewise


def reasons(
    training_log_probs: Tensor,
    rollout_log_probs: Tensor,
    step_mask: Tensor,
    rules: Rules,
    *,
    step_kl: Tensor | None = None,
) -> list[Reason]:
    """Finds all that rejects a row, by its log-probs, mask and exact KL, [T]; empty if none does.

    A step that is not finite comes first. `auto` criteria are named only if nothing else explains
    the rejection: `AutoBands.reasons` knows the bounds that they had.
    """
    ratios = compute_log_ratios(
        training_log_probs.unsqueeze(0),
        rollout_log_probs.unsqueeze(0),
        step_mask.unsqueeze(0),
        None if step_kl is None else step_kl.unsqueeze(0),
    )
    fixed = list(_fixed(ratios, rules))
    if fixed:
        return fixed
    return [Reason(band.name, _shown(band, _worst(ratios, band))) for band in rules.auto]


def _fixed(ratios: LogRatios, rules: Rules) -> Iterator[Reason]:
    """Yields the reasons whose bounds are numbers."""
    broken = ratios.step_mask & ~ratios.finite_mask
    if broken.any():
        yield Reason("not finite", float(ratios.difference[broken][0]))
    for band in rules.bands:
        value = _worst(ratios, band)
        if not band.lower <= value <= band.upper:
            # Sorted, since k1 is -log(ratio): shown as ratios, its bounds change places.
            lower, upper = sorted((_shown(band, band.lower), _shown(band, band.upper)))
            yield Reason(band.name, _shown(band, value), lower if lower > 0 else None, upper)
    if rules.level is not None and rules.bounds.mode == "mask":
        weights = weigh(ratios, rules.level, rules.bounds).raw
        outliers = weights[outside(weights, rules.bounds) & ratios.unit_mask(weights)]
        if len(outliers):
            yield Reason("rollout_is", float(outliers[0]), rules.bounds.lower, rules.bounds.upper)
    if rules.log_veto is not None:
        lowest = float(torch.where(ratios.step_mask, ratios.difference, math.inf).min())
        if lowest < rules.log_veto:
            yield Reason("veto", math.exp(lowest), math.exp(rules.log_veto))


def _worst(ratios: LogRatios, band: Band) -> float:
    """Returns the statistic that is farthest beyond the band, or nearest to its edge."""
    values = statistic(ratios, band)
    values = values[ratios.unit_mask(values)]
    if not len(values):
        return 0.0
    beyond = values.abs() if band.auto else torch.maximum(values - band.upper, band.lower - values)
    return float(values[beyond.argmax()])


def _shown(band: Band, value: float) -> float:
    """Returns k1, which is -log(ratio), as the ratio, and anything else as it is."""
    return math.exp(-value) if band.estimator == "k1" else value

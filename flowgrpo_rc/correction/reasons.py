"""Why a row was rejected, in the words of the settings: for people, on a few rows after the
fact.
"""

from __future__ import annotations

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
    """A criterion that does not keep a row. value: its statistic, the ratio training / rollout for
    k1; lower, upper: what is kept, None where there is no such bound or where it follows the run
    (`auto`)."""

    criterion: str
    value: float
    lower: float | None = None
    upper: float | None = None


def reasons(
    training: Tensor, rollout: Tensor, mask: Tensor, rules: Rules, *, step_kl: Tensor | None = None
) -> list[Reason]:
    """All that reject a row, for its log-probs, steps that exist and exact KL [T]; [] where nothing
    here does.

    A step that is not finite comes first. `auto` bands are named where nothing else explains the
    rejection: where they stood when they judged is not known here.
    """
    exact = None if step_kl is None else step_kl.unsqueeze(0)
    ratios = compute_log_ratios(
        training.unsqueeze(0), rollout.unsqueeze(0), mask.unsqueeze(0), exact
    )
    return list(_fixed(ratios, rules)) or [
        Reason(band.name, _shown(band, _worst(ratios, band))) for band in rules.auto
    ]


def _fixed(ratios: LogRatios, rules: Rules) -> Iterator[Reason]:
    broken = ratios.step_mask & ~ratios.finite_mask
    if broken.any():
        yield Reason("not finite", float(ratios.difference[broken][0]))
    for band in rules.bands:
        value = _worst(ratios, band)
        if not band.lower <= value <= band.upper:
            lower, upper = sorted((_shown(band, band.lower), _shown(band, band.upper)))
            yield Reason(band.name, _shown(band, value), lower if lower > 0 else None, upper)
    if rules.level is not None and rules.bounds.mode == "mask":
        weights = weigh(ratios, rules.level, rules.bounds).raw
        for value in weights[outside(weights, rules.bounds) & ratios.unit_mask(weights)][
            :1
        ].tolist():
            yield Reason("rollout_is", value, rules.bounds.lower, rules.bounds.upper)
    if rules.log_veto is not None:
        lowest = float(torch.where(ratios.step_mask, ratios.difference, math.inf).min())
        if lowest < rules.log_veto:
            yield Reason("veto", math.exp(lowest), math.exp(rules.log_veto))


def _worst(ratios: LogRatios, band: Band) -> float:
    """The statistic that is farthest beyond the band, or nearest to its edge."""
    values = statistic(ratios, band)
    values = values[ratios.unit_mask(values)]
    if not len(values):
        return 0.0
    beyond = values.abs() if band.auto else torch.maximum(values - band.upper, band.lower - values)
    return float(values[beyond.argmax()])


def _shown(band: Band, value: float) -> float:
    """k1, which is -log(ratio), as the ratio; anything else as it is."""
    return math.exp(-value) if band.estimator == "k1" else value

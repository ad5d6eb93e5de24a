"""Which formula gave log-probs: that of the settings, or one with a known mistake.

They follow from the standard deviation s of a step and its squared error r = mean_D (x' - m)^2.
Without means r is s^2 (1 +- sqrt(2 / D)), which still tells the mean of a step's log-probs.

Legend: B samples, T steps of each, S steps of the schedule, D elements of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.calibration.noise import LEAST, SIGMAS
from flowgrpo_rc.core.schedule import shift_sigmas
from flowgrpo_rc.core.search import fit
from flowgrpo_rc.core.transition import KINDS, Transition, log_prob, transition
from flowgrpo_rc.diagnosis.dump import Dump

FORMS = {
    "gaussian": "the mean over the elements of the log-density",
    "short": "the short -(x' - mean)^2",
    "sum": "a sum over the elements, not their mean",
    "plain": "a log-density without its normaliser (-log std - log(2 pi) / 2)",
    "no log 2 pi": "a log-density without -log(2 pi) / 2",
}
SIZES = [2 ** (k / 2) for k in range(-6, 7)]  # of what is fitted, relative


class Formula(NamedTuple):
    """Says how log-probs may have been computed."""

    cause: str  # a key of remedies.yaml; empty for the formula of the settings
    words: str
    std: Tensor  # that a log-prob divides by, [B, T]; nan where a step has no density
    drawn: Tensor  # standard deviation of the noise, [B, T]
    form: str = "gaussian"  # a key of `FORMS`
    factor: float = 1.0

    def values(self, dump: Dump, squares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns log-probs [B, T], and by how much noise of twice the variance lowers them."""
        squares = self.drawn.square() if squares is None else squares
        step = Transition(torch.zeros(()), self.std.reshape(-1, 1))
        density, short = (
            log_prob(step, squares.sqrt().reshape(-1, 1), convention=convention).view_as(squares)
            for convention in ("gaussian", "peers")
        )
        exponent = squares / (2 * self.std.square())
        elements = dump.end.shape[2]
        values, slope = {
            "gaussian": (density, exponent),
            "short": (short, squares),
            "sum": (elements * density, elements * exponent),
            "plain": (-exponent, exponent),
            "no log 2 pi": (density + math.log(2 * math.pi) / 2, exponent),
        }[self.form]
        return self.factor * values, self.factor * slope


def explain(dump: Dump, found: Tensor, squares: Tensor | None, spare: Tensor) -> Formula | None:
    """Returns the formula of log-probs [B, T]; None if no known one fits.

    Mistakes without a size come first, since a size that is fitted explains much. `squares` [B, T]
    are mean_D (x' - m)^2, if known; `spare` is from `misfit`.
    """

    def off(formula: Formula) -> float:
        if squares is not None:  # which tell how large the noise was
            error = (squares / formula.drawn.square()).nanmean().log().abs().item()
            return misfit(dump, formula, found, squares, spare) * (1 + 1e-3 * error)
        return misfit(dump, formula, found, squares, spare)

    def best(cause: str) -> Formula:
        size = fit(lambda size: off(sized(dump, right, cause, size)), SIZES)
        return sized(dump, right, cause, size)

    right = min(declared(dump), key=off)
    least = right if off(right) < 1 else min(mistaken(dump, right), key=off)
    if off(least) >= 1:
        least = min(map(best, ("convention", "sigma", "noise_level")), key=off)
    return least if off(least) < 1 else None


def misfit(
    dump: Dump, formula: Formula, found: Tensor, squares: Tensor | None, spare: Tensor
) -> float:
    """Returns how far log-probs [B, T] are off, relative to what chance explains: below 1 they fit.

    The mean of the worst step counts. `spare` [S] is what else may move it, in units of the slope.
    """
    values, slope = formula.values(dump, squares)
    off = (found - values) / slope
    mean, count = by_step(dump, off)
    error = math.sqrt(2 / dump.end.shape[2]) if squares is None else 0.0
    allowed = (SIGMAS * error / count.sqrt()).clamp(min=LEAST["variance"]) + spare
    return (mean.abs() / allowed)[count > 0].max().item() if count.any() else math.inf


def by_step(dump: Dump, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and number of the finite values [B, T] of each step of the schedule, [S]."""
    known, place = torch.isfinite(values).flatten(), dump.place.flatten()
    zeros = torch.zeros(len(dump.sigmas) - 1, dtype=torch.float64)
    count = zeros.index_add(0, place, known.double())
    return zeros.index_add(0, place, torch.where(known, values.flatten(), 0.0)) / count, count


def sigma(dump: Dump, by: int = 0) -> Tensor:
    """Returns the noise level so many places behind the start of each step, [B, T]; nan outside."""
    padded = torch.cat([dump.sigmas, dump.sigmas.new_full((3,), math.nan)])
    return padded[dump.place + by]  # place -1 is the last one


def gaussian(
    dump: Dump, now: Tensor, after: Tensor, kind: str = "", level: float = 1.0, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the factor of the state in the mean of steps, and their standard deviation, [B, T].

    The steps go from sigma `now` to `after`. Kind, and noise level and shift, which are relative,
    are those of the settings unless given.
    """
    first, now, after = (shift_sigmas(each, shift) for each in (dump.sigmas[1], now, after))
    one = torch.ones(now.numel(), 1, dtype=torch.float64)
    level *= dump.settings["noise_level"]
    kind = kind or dump.settings["sde_type"]
    ends = now.flatten(), after.flatten()
    step = transition(one, 0 * one, *ends, kind=kind, noise_level=level, sigma_max=first)
    std = step.std.expand_as(one).view_as(now)
    return step.mean.view_as(now), torch.where((std > 0) & std.isfinite(), std, math.nan)


def declared(dump: Dump) -> list[Formula]:
    """Returns what fits the settings; of `cps` the short form, too, which is usual."""
    _, std = gaussian(dump, sigma(dump), sigma(dump, 1))
    forms = ["gaussian", "short"] if dump.settings["sde_type"] == "cps" else ["gaussian"]
    return [Formula("", FORMS[form], std, std, form) for form in forms]


def mistaken(dump: Dump, right: Formula) -> Iterator[Formula]:
    """Yields the formulas with one mistake that has no size."""
    for form, words in FORMS.items():
        yield right._replace(cause="convention", words=words, form=form)
    before, now, after, later = (sigma(dump, by) for by in (-1, 0, 1, 2))
    cps = dump.settings["sde_type"] == "cps"  # whose noise follows from the end of a step alone
    steps = {
        "the sigmas of the step before": (before, now),
        "the sigmas of the step behind": (after, later),
        "the dt of the step before": (now, 2 * now - before),
        "the dt of the step behind": (now, now + later - after),
        "the sigma of the step's other end": (now, now) if cps else (after, 2 * after - now),
        "no sqrt(-dt) in the standard deviation": (now, now - 1),
    }
    stds = [("sigma", words, gaussian(dump, *ends)) for words, ends in steps.items()]
    stds += [("sde_type", f"sde_type {kind}", gaussian(dump, now, after, kind)) for kind in KINDS]
    for cause, words, (_, std) in stds:
        # A step that was drawn right may have got a wrong log-prob.
        for drawn in (right.std, std):
            yield right._replace(cause=cause, words=words, std=std, drawn=drawn)


def sized(dump: Dump, right: Formula, cause: str, size: float) -> Formula:
    """Returns the formula with a mistake of a relative size."""
    if cause == "convention":
        return right._replace(cause=cause, words=f"{size:.3g} times the right one", factor=size)
    ends = sigma(dump), sigma(dump, 1)
    if cause == "sigma":
        words, (_, std) = f"sigmas shifted by {size:.3g}", gaussian(dump, *ends, shift=size)
    else:
        level = size * dump.settings["noise_level"]
        words, (_, std) = f"noise_level {level:.3g}", gaussian(dump, *ends, level=size)
    return right._replace(cause=cause, words=words, std=std, drawn=std)

"""Which formula gave log-probs: that of the settings, or one with a known mistake.

They follow from the standard deviation s of a step and its squared error r = mean_D (x' - m)^2.
Without means r is s^2 (1 +- sqrt(2 / D)), which still tells the mean of a step's log-probs.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.calibration.noise import LEAST, SIGMAS
from flowgrpo_rc.core.schedule import shift_sigmas
from flowgrpo_rc.core.search import fit
from flowgrpo_rc.core.transition import KINDS, transition
from flowgrpo_rc.diagnosis.dump import Dump

USUAL = "the mean over the elements of the log-density"
SHORT = "the short -(x' - mean)^2"
PLAIN = "a log-density without its normaliser (-log std - log(2 pi) / 2)"
SIZES = [2 ** (k / 2) for k in range(-6, 7)]  # of what is fitted, relative


class Formula(NamedTuple):
    """Says how log-probs may have been computed."""

    cause: str  # a name of the table of causes; empty for the formula of the settings
    words: str
    std: Tensor  # that a log-prob divides by, [B, T]; nan where a step has no density
    drawn: Tensor  # standard deviation of the noise, [B, T]
    form: str = USUAL  # a key of `forms`
    factor: float = 1.0

    def forms(self, dump: Dump, squares: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns log-probs [B, T] of each form, and by how much twice the variance lowers them."""
        exponent = squares / (2 * self.std.square())
        density = -exponent - self.std.log() - math.log(2 * math.pi) / 2
        elements = dump.end.shape[2]
        return {
            USUAL: (density, exponent),
            SHORT: (-squares, squares),
            PLAIN: (-exponent, exponent),
            "a sum over the elements, not their mean": (elements * density, elements * exponent),
            "a log-density without -log(2 pi) / 2": (-exponent - self.std.log(), exponent),
        }

    def values(self, dump: Dump, squares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns log-probs [B, T], and by how much noise of twice the variance lowers them."""
        squares = self.drawn.square() if squares is None else squares
        values, slope = self.forms(dump, squares)[self.form]
        return self.factor * values, self.factor * slope

    def squares(self, dump: Dump, log_probs: Tensor) -> Tensor:
        """Returns the mean_D (x' - m)^2 of log-probs [B, T]."""
        values, slope = self.values(dump)
        return self.drawn.square() * (1 + (values - log_probs) / slope).clamp(min=0)


def explain(
    dump: Dump, log_probs: Tensor, squares: Tensor | None, other: Formula | None = None
) -> Formula | None:
    """Returns the formula of log-probs [B, T]; `other`, that of the other side, if no known fits.

    Mistakes without a size come first, since a size that is fitted explains much, and after another
    side's a mismatch, too. `squares` [B, T] are mean_D (x' - m)^2, if known.
    """
    error = math.sqrt(2 / dump.end.shape[2]) if squares is None else 0.0

    def off(formula: Formula) -> float:
        """Compares the mean of the worst step with what chance explains: below 1 it fits."""
        values, slope = formula.values(dump, squares)
        mean, count = dump.by_step((log_probs - values) / slope)
        allowed = (SIGMAS * error / count.sqrt()).clamp(min=LEAST["variance"])
        worst = (mean.abs() / allowed)[count > 0].max().item() if count.any() else math.inf
        if squares is None:
            return worst
        apart = (squares / formula.drawn.square()).nanmean().log().abs().item()
        return worst * (1 + 1e-3 * apart)  # of two that fit alike, the one with the right noise

    def sized(cause: str, size: float) -> Formula:
        if cause == "convention":
            words = f"{size:.3g} times the right one"
            return right._replace(cause=cause, words=words, factor=size)
        ends = (dump.sigma(), dump.sigma(1))
        if cause == "sigma":
            words = f"sigmas shifted by {size:.3g}"
            _, std = gaussian(dump, *ends, shift=size)
        else:
            words = f"noise_level {size * dump.settings['noise_level']:.3g}"
            _, std = gaussian(dump, *ends, level=size)
        return right._replace(cause=cause, words=words, std=std, drawn=std)

    def best(cause: str) -> Formula:
        return sized(cause, fit(lambda size: off(sized(cause, size)), SIZES))

    right = min(declared(dump), key=off)
    least = right if off(right) < 1 else min(mistaken(dump, right), key=off)
    if off(least) >= 1 and other is None:
        least = min(map(best, ("convention", "sigma", "noise_level")), key=off)
    return least if off(least) < 1 else other


def gaussian(
    dump: Dump, start: Tensor, end: Tensor, kind: str = "", level: float = 1.0, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the factor of the state in a mean, and the standard deviation, of steps [B, T].

    They go from sigma `start` to `end`; level and shift are relative to the settings.
    """
    first, start, end = (shift_sigmas(sigma, shift) for sigma in (dump.sigmas[1], start, end))
    level *= dump.settings["noise_level"]
    kind = kind or dump.settings["sde_type"]
    ones = torch.ones_like(start).flatten()
    ends = (start.flatten(), end.flatten())
    step = transition(ones, 0 * ones, *ends, kind=kind, noise_level=level, sigma_max=first)
    std = torch.where((step.std > 0) & step.std.isfinite(), step.std, math.nan)
    return step.mean.view_as(start), std.view_as(start)


def declared(dump: Dump) -> list[Formula]:
    """Returns what fits the settings; of `cps` the short form, too, which is usual."""
    _, std = gaussian(dump, dump.sigma(), dump.sigma(1))
    forms = [USUAL, SHORT] if dump.settings["sde_type"] == "cps" else [USUAL]
    return [Formula("", form, std, std, form) for form in forms]


def mistaken(dump: Dump, right: Formula) -> Iterator[Formula]:
    """Yields the formulas with one mistake that has no size."""
    for form in right.forms(dump, right.drawn):
        yield right._replace(cause="convention", words=form, form=form)
    before, start, end, later = (dump.sigma(by) for by in (-1, 0, 1, 2))
    cps = dump.settings["sde_type"] == "cps"  # whose noise follows from the end of a step alone
    steps = {
        "the sigmas of the step before": (before, start),
        "the sigmas of the step behind": (end, later),
        "the sigma of the step's other end": (start, start) if cps else (end, 2 * end - start),
        "no sqrt(-dt) in the standard deviation": (start, start - 1),
    }
    stds = [("sigma", words, gaussian(dump, *ends)) for words, ends in steps.items()]
    stds += [("sde_type", f"sde_type {kind}", gaussian(dump, start, end, kind)) for kind in KINDS]
    for cause, words, (_, std) in stds:
        # A step that was drawn right may have got a wrong log-prob.
        for drawn in (right.std, std):
            yield right._replace(cause=cause, words=words, std=std, drawn=drawn)

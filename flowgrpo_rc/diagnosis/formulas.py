"""Which formula gave log-probs: that of the settings, or one with a known mistake.

They follow from the standard deviation s of a step and its squared error r = mean_D (x' - m)^2.
Without means r is s^2 (1 +- sqrt(2 / D)), which still gives the mean of a step's log-probs.

Legend: N steps of samples, S steps of the schedule, D elements of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    "short sum": "a sum over the elements of -(x' - mean)^2",
    "plain": "a log-density without its normaliser (-log std - log(2 pi) / 2)",
    "no log 2 pi": "a log-density without -log(2 pi) / 2",
}
SIZES = [2 ** (k / 2) for k in range(-6, 7)]  # of what is fitted, relative


class Formula(NamedTuple):
    """How log-probs may have been computed."""

    cause: str  # a key of remedies.yaml; empty for the formula of the settings
    words: str
    std: Tensor  # that the log-prob divides by, [N]; nan where a step has no density
    drawn: Tensor  # standard deviation of the noise, [N]
    form: str = "gaussian"  # a key of `FORMS`
    factor: float = 1.0

    def values(self, elements: int, squares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the log-probs [N], and how much noise of twice the variance lowers them."""
        squares = self.drawn.square() if squares is None else squares
        step = Transition(torch.zeros_like(self.std).unsqueeze(1), self.std.unsqueeze(1))
        error = squares.sqrt().unsqueeze(1)
        density, short = (log_prob(step, error, convention=name) for name in ("gaussian", "peers"))
        exponent = squares / (2 * self.std.square())
        log_2pi = math.log(2 * math.pi) / 2
        values, slope = {
            "gaussian": (density, exponent),
            "short": (short, squares),
            "sum": (elements * density, elements * exponent),
            "short sum": (elements * short, elements * squares),
            "plain": (-exponent, exponent),
            "no log 2 pi": (density + log_2pi, exponent),
        }[self.form]
        return self.factor * values, self.factor * slope

    def misfit(self, dump: Dump, found: Tensor, squares: Tensor | None, spare: Tensor) -> float:
        """Returns how far log-probs [N] are off, relative to what chance explains; below 1 they fit.

        It is the worst step's mean over samples, or their spread. `spare` is what the mean may be
        off besides, in units of the slope, [S].
        """
        elements = dump.start.shape[1]
        values, slope = self.values(elements, squares)
        error = 0.0 if squares is not None else math.sqrt(2 / elements)
        off = (found - values) / slope
        mean, count = by_step(dump, off)
        allowed = (SIGMAS * error / count.sqrt()).clamp(min=LEAST["variance"]) + spare
        worst = (mean.abs() / allowed).nan_to_num(0.0).max().item()
        if not torch.isfinite(mean).any():
            return math.inf
        freedom = (count - 1).clamp(min=0).sum().item()
        if squares is None and freedom:
            variance = (off - mean[dump.place]).square().nansum().item() / freedom / error**2
            worst = max(worst, abs(variance - 1) / (SIGMAS * math.sqrt(2 / freedom)))
        return worst

    def agrees(self, other: Formula) -> bool:
        """Returns whether it is the same formula."""
        return self[:2] == other[:2] and self.form == other.form


def by_step(dump: Dump, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and number of the finite values [N] of each step of the schedule, [S]."""
    known = torch.isfinite(values)
    zeros = torch.zeros(len(dump.sigmas) - 1, dtype=torch.float64)
    count = zeros.index_add(0, dump.place, known.double())
    return zeros.index_add(0, dump.place, torch.where(known, values, 0.0)) / count, count


def noise_level(dump: Dump, by: int) -> Tensor:
    """Returns sigma so many places behind the start of each step, [N]; nan outside the schedule."""
    place = dump.place + by
    inside = (place >= 0) & (place < len(dump.sigmas))
    return torch.where(inside, dump.sigmas[place.clamp(0, len(dump.sigmas) - 1)], math.nan)


def gaussian(
    dump: Dump, ends: tuple[Tensor, Tensor], *, kind: str, level: float, shift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the factor of the state in the mean of steps, and their standard deviation, [N]."""
    one = torch.ones(len(ends[0]), 1, dtype=torch.float64)
    sigma, after = (shift_sigmas(end, shift) for end in ends)
    first = shift_sigmas(dump.sigmas[1], shift)
    step = transition(one, 0 * one, sigma, after, kind=kind, noise_level=level, sigma_max=first)
    std = step.std.expand_as(one)[:, 0]
    return step.mean[:, 0], torch.where((std > 0) & torch.isfinite(std), std, math.nan)


def declared(dump: Dump) -> list[Formula]:
    """Returns what fits the settings: two formulas for `cps`, which usually has the short one."""
    kind, level = dump.settings["sde_type"], dump.settings["noise_level"]
    told = {"gaussian": ["gaussian"], "peers": ["short"]}
    usual = ["gaussian", "short"] if kind == "cps" else ["gaussian"]
    forms = told.get(dump.settings.get("log_prob_convention", ""), usual)
    ends = noise_level(dump, 0), noise_level(dump, 1)
    _, std = gaussian(dump, ends, kind=kind, level=level)
    return [Formula("", FORMS[form], std, std, form) for form in forms]


def mistaken(dump: Dump, right: Formula) -> Iterator[Formula]:
    """Yields the formulas with one mistake that has no size."""
    for form, words in FORMS.items():
        if form != right.form:
            yield right._replace(cause="convention", words=words, form=form)
    kind, level = dump.settings["sde_type"], dump.settings["noise_level"]
    before, now, after, later = (noise_level(dump, by) for by in (-1, 0, 1, 2))
    pairs = {
        "the sigmas of the step before": (before, now),
        "the sigmas of the step behind": (after, later),
        "the sigma of the step's other end": (now, now)
        if kind == "cps"
        else (after, 2 * after - now),
        "the dt of the step before": (now, 2 * now - before),
        "the dt of the step behind": (now, now + later - after),
        "no sqrt(-dt) in the standard deviation": (now, now - 1),
    }
    stds = [("sigma", w, gaussian(dump, p, kind=kind, level=level)[1]) for w, p in pairs.items()]
    for other in KINDS:
        std = gaussian(dump, (now, after), kind=other, level=level)[1]
        stds.append(("sde_type", f"sde_type {other} in place of {kind}", std))
    for cause, words, std in stds:
        known = std.isfinite()
        if not torch.allclose(std[known], right.std[known], rtol=1e-3):
            wrong = right._replace(cause=cause, words=words, std=std)
            yield from (wrong, wrong._replace(drawn=std))


def sized(dump: Dump, right: Formula, misfit: Callable[[Formula], float]) -> Iterator[Formula]:
    """Yields the formulas with one mistake of a size, each with the size that fits best."""
    kind, level = dump.settings["sde_type"], dump.settings["noise_level"]
    ends = noise_level(dump, 0), noise_level(dump, 1)

    def factor(k: float) -> Formula:
        return right._replace(cause="convention", words=f"{k:.3g} times the right ones", factor=k)

    def noise(k: float) -> Formula:
        words = f"noise of {k:.3g} times the standard deviation"
        return right._replace(cause="noise", words=words, drawn=k * right.std)

    def other_level(k: float) -> Formula:
        _, std = gaussian(dump, ends, kind=kind, level=k * level)
        words = f"noise_level {k * level:.3g} in place of {level:g}"
        return right._replace(cause="noise_level", words=words, std=std, drawn=std)

    def shifted(k: float) -> Formula:
        _, std = gaussian(dump, ends, kind=kind, level=level, shift=k)
        words = f"sigmas that are shifted by {k:.3g}"
        return right._replace(cause="sigma", words=words, std=std, drawn=std)

    for make in (factor, noise, other_level, shifted):
        yield make(fit(lambda k, make=make: misfit(make(k)), SIZES))


def explain(
    dump: Dump, found: Tensor, squares: Tensor | None, spare: Tensor, rights: list[Formula]
) -> Formula | None:
    """Returns the formula of log-probs [N]; None if no known one fits.

    Mistakes without a size come first, since a size that is fitted explains much.
    """

    def misfit(formula: Formula) -> float:
        return formula.misfit(dump, found, squares, spare)

    right = min(rights, key=misfit)
    for formulas in ([right], mistaken(dump, right), sized(dump, right, misfit)):
        least = min(formulas, key=misfit)
        if misfit(least) < 1:
            return least
    return None

"""Means over prompts with confidence intervals, and the difference between two policies.

The unit is the prompt: samples of one prompt are alike, so their mean counts as one observation. An
interval is Student's t interval over P prompts, mean +- t sd / sqrt(P). The difference is taken
sample by sample first: both policies start from the same noise, so what a prompt or a noise makes
easy or hard cancels (common random numbers).

Shapes: P prompts, S samples of each.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean over prompts, and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


class PolicyComparison(NamedTuple):
    """Two policies on the same prompts and noises."""

    base: Estimate  # the base model
    tuned: Estimate  # the model with its LoRA
    change: Estimate  # tuned minus base, prompt by prompt
    num_prompts: int  # of which both have a score


def compare(base: np.ndarray, tuned: np.ndarray) -> PolicyComparison:
    """Compares the scores [P, S] of two policies on the same prompts and noises.

    A sample that one of them lacks, NaN, counts for neither.
    """
    both = np.isfinite(base) & np.isfinite(tuned)
    rows = both.any(1)

    def mean(scores: np.ndarray) -> Estimate:
        sums = np.where(both, scores, 0.0)[rows].sum(1)
        return estimate(sums / both[rows].sum(1))

    return PolicyComparison(mean(base), mean(tuned), mean(tuned - base), int(rows.sum()))


def estimate(values: np.ndarray) -> Estimate:
    """Computes the mean of independent values [P] and its t interval of 95%.

        mean +- t_{P-1} sd / sqrt(P)

    The ends are NaN for fewer than two values, and all is NaN for none.
    """
    count = len(values)
    mean = float(values.mean()) if count else math.nan
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    half = t_quantile(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


@cache
def t_quantile(df: int, level: float = LEVEL) -> float:
    """Returns the t for which Student's distribution has `level` of its mass within -t to t.

    The mass is a finite sum for every whole number of degrees of freedom: Abramowitz and Stegun,
    Handbook of Mathematical Functions, 26.7.3 and 26.7.4. It is inverted by bisection.
    """
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _mass_within(middle, df) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)


def _mass_within(angle: float, df: int) -> float:
    """Returns the mass of Student's distribution within -t to t, t = sqrt(df) tan(angle)."""
    sine = math.sin(angle)
    square = math.cos(angle) ** 2
    odd = df % 2 == 1
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(3 if odd else 2, df + 1, 2):
        total += term
        term *= square * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total

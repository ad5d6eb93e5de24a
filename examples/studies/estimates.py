"""Means over the seeds of a cell, with 95% intervals of Student's t, and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cells import Cell

# Two-sided 95% quantiles of Student's t for 2, 3, ... values.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOTHING = "-"

Runs = Mapping[int, Cell]  # by seed


class Estimate(NamedTuple):
    """A mean with its interval.

    Attributes:
      mean: mean of the values.
      half: half the width of the interval; infinite for one value.
      count: number of values.
    """

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isinf(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"

    @property
    def signed(self) -> str:
        """Formats the mean with its sign and its interval."""
        mean = f"{self.mean:+.3f}"
        return mean if math.isinf(self.half) else f"{mean} ± {self.half:.3f}"

    @property
    def error(self) -> float:
        """Returns the standard error of the mean; infinite for one value."""
        return self.half / T95[max(self.count, 2) - 2]

    @property
    def chance(self) -> float:
        """Returns how often a mean of 0 would be as far off, by Student's t; 1 for one value.

        The finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
        """
        degrees = self.count - 1
        if not degrees:
            return 1.0
        odd = degrees % 2
        angle = math.atan2(abs(self.mean), self.error * math.sqrt(degrees))
        term, total = math.cos(angle) ** odd, 0.0
        for number in range(degrees // 2):
            total += term
            term *= math.cos(angle) ** 2 * (2 * number + 1 + odd) / (2 * number + 2 + odd)
        within = math.sin(angle) * total
        return 1 - (2 / math.pi * (angle + within) if odd else within)


def estimate(values: Sequence[float]) -> Estimate:
    """Computes the mean and the interval of at most ten values."""
    count = len(values)
    if count == 1:
        return Estimate(values[0], math.inf, 1)
    half = T95[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.mean(values), half, count)


def by_cell(
    cells: Mapping[str, Cell], rollouts: Sequence[str], arms: Sequence[str]
) -> dict[tuple[str, str], dict[int, Cell]]:
    """Sorts runs by cell.

    Args:
      cells: name -> content of a run's file.
      rollouts: names of the study's rollouts.
      arms: names of its arms.

    Returns:
      (rollout, arm) -> seed -> run, in the study's order, for the cells that have runs.
    """
    found: dict[tuple[str, str], dict[int, Cell]] = {}
    for rollout in rollouts:
        for arm in arms:
            runs = {
                run["seed"]: run
                for run in cells.values()
                if (run["rollout"], run["arm"]) == (rollout, arm)
            }
            if runs:
                found[rollout, arm] = dict(sorted(runs.items()))
    return found


def after(runs: Runs) -> Estimate:
    """Computes the mean reward after training."""
    return estimate([run["after"] for run in runs.values()])


def difference(runs: Runs, reference: Runs) -> Estimate | None:
    """Compares the rewards after training over the seeds that both cells have.

    Args:
      runs: the runs of one cell.
      reference: the runs of the other.

    Returns:
      The mean of their differences, or None without a common seed.
    """
    common = runs.keys() & reference.keys()
    if not common:
        return None
    return estimate([runs[seed]["after"] - reference[seed]["after"] for seed in sorted(common)])


def collapsed(runs: Runs) -> int:
    """Counts the runs that end below where they started."""
    return sum(run["after"] < run["before"] for run in runs.values())

"""The tables, numbers and conclusions of docs/evidence.md that come from the learning study.

Intervals are 95% intervals of Student's t over the seeds. Differences are paired: each run is
compared with the reference run of the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cells import Cell
from learning import ARMS, ROLLOUTS
from tables import markdown

STUDY = "learning"
REFERENCE = ("fp32", "bypass")
# Two-sided 95% quantiles of Student's t for 2, 3, ... values.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOTHING = "-"
CLOSE = 0.03  # mean rewards of two cells that differ by less count as equal

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
    cells: Mapping[str, Cell],
    rollouts: Sequence[str] = tuple(ROLLOUTS),
    arms: Sequence[str] = tuple(ARMS),
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


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training, with what was clipped and rejected."""
    grouped = by_cell(cells)
    reference = grouped.get(REFERENCE, {})
    rows = []
    for (rollout, arm), runs in grouped.items():
        gap = None if (rollout, arm) == REFERENCE else difference(runs, reference)
        exact = estimate([run["exact_after"] for run in runs.values()])
        against = NOTHING if gap is None else gap.signed
        fell = f"{collapsed(runs)} of {len(runs)}"
        clipped = _over_runs(runs, "clip_fraction", ".1%")
        rejected = _over_runs(runs, "rejected_fraction", ".1%")
        row = [rollout, f"`{arm}`", len(runs), after(runs), against, exact, fell]
        rows.append([*row, clipped, rejected])
    header = [
        "rollout",
        "arm",
        "seeds",
        "reward after",
        "against the reference",
        "exact match",
        "collapsed",
        "clipped",
        "rejected",
    ]
    return markdown(header, rows)


def _over_runs(runs: Runs, curve: str, form: str) -> str:
    """The mean of a curve over all runs and iterations, for runs that measure it."""
    values = [value for run in runs.values() for value in run["curves"].get(curve, [])]
    return format(statistics.mean(values), form) if values else NOTHING


def before(cells: Mapping[str, Cell]) -> str:
    """Formats the reward of the base model, which is the same for every run."""
    values = {run["before"] for run in cells.values()}
    assert len(values) <= 1
    return f"{values.pop():.3f}" if values else NOTHING


def done(cells: Mapping[str, Cell]) -> str:
    """Formats the number of runs."""
    return str(len(cells))


def cpu_seconds(cells: Mapping[str, Cell]) -> str:
    """Formats the range over the cells of the median CPU seconds of a run."""
    medians = [
        statistics.median(run["cpu_seconds"] for run in runs.values())
        for runs in by_cell(cells).values()
    ]
    return f"{min(medians):.0f} to {max(medians):.0f}" if medians else NOTHING


def reached(rollout: str, arm: str) -> Callable[[Mapping[str, Cell]], str]:
    """Makes an entry: the reward of a cell after training, with its interval."""
    return lambda cells: str(after(by_cell(cells)[rollout, arm]))


def gap(
    cells: Mapping[str, Cell], rollout: str, arm: str, to: tuple[str, str] = REFERENCE
) -> Estimate:
    """Computes the reward of a cell after training less that of another cell.

    Args:
      cells: the cells of the study.
      rollout: the rollout of the cell.
      arm: its arm.
      to: (rollout, arm) of the other cell.

    Returns:
      The mean of the paired differences.
    """
    grouped = by_cell(cells)
    found = difference(grouped[rollout, arm], grouped[to])
    assert found is not None
    return found


def less(
    rollout: str, arm: str, to: tuple[str, str] = REFERENCE
) -> Callable[[Mapping[str, Cell]], str]:
    """Makes an entry: the reward of a cell less that of another, with sign and interval."""
    return lambda cells: gap(cells, rollout, arm, to).signed


def over_runs(rollout: str, arm: str, curve: str, form: str) -> Callable[[Mapping[str, Cell]], str]:
    """Makes an entry: the mean of a curve over the runs of a cell, in a given format."""
    return lambda cells: _over_runs(by_cell(cells)[rollout, arm], curve, form)


def as_good(cells: Mapping[str, Cell], rollout: str, arm: str) -> bool:
    """Tells whether no run collapsed and the mean is less than CLOSE below the reference's."""
    return collapsed(by_cell(cells)[rollout, arm]) == 0 and gap(cells, rollout, arm).mean > -CLOSE


def worse(
    cells: Mapping[str, Cell], rollout: str, arm: str, to: tuple[str, str] = REFERENCE
) -> bool:
    """Tells whether a cell is below another with its whole interval."""
    found = gap(cells, rollout, arm, to)
    return found.mean + found.half < 0


def all_collapse(cells: Mapping[str, Cell], rollout: str, arm: str) -> bool:
    """Tells whether every run of a cell collapsed, to a mean reward below 0.1."""
    runs = by_cell(cells)[rollout, arm]
    return collapsed(runs) == len(runs) and after(runs).mean < 0.1


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "learning_runs": done,
    "learning_before": before,
    "learning_rewards": rewards,
    "learning_int4_recipe": reached("int4", "recipe"),
    "learning_int4_clipped": over_runs("int4", "recipe", "clip_fraction", ".0%"),
    "learning_bf16_recipe": less("bf16", "recipe"),
    "learning_stale_recipe": less("stale", "recipe"),
    "learning_stale_size": over_runs("stale", "is", "eff_sample_size", ".6f"),
    "learning_fault_rejected": over_runs("fault", "is_rs", "rejected_fraction", ".0%"),
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "learning_int4_collapses": lambda c: all_collapse(c, "int4", "recipe"),
    "learning_int4_is_saved": lambda c: (
        as_good(c, "int4", "recomputed") and as_good(c, "int4", "guard")
    ),
    "learning_bf16_costs": lambda c: (
        worse(c, "bf16", "recipe") and not all_collapse(c, "bf16", "recipe")
    ),
    "learning_bf16_is_saved": lambda c: as_good(c, "bf16", "calibrated"),
    "learning_stale_costs": lambda c: (
        worse(c, "stale", "recipe") and worse(c, "stale", "recipe", ("stale", "is"))
    ),
    "learning_stale_is_saved": lambda c: as_good(c, "stale", "is"),
    "learning_weights_do_nothing": lambda c: float(ENTRIES["learning_stale_size"](c)) > 0.999,
    "learning_fault_collapses": lambda c: all_collapse(c, "fault", "recipe"),
    "learning_fault_is_found": lambda c: as_good(c, "fault", "is_rs"),
}

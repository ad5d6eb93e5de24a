"""The tables, numbers and conclusions of docs/evidence.md that come from the ladder of rollouts.

Differences are to exact rollouts (`REFERENCE`), taken seed by seed. Two or three seeds give a poor
estimate of a spread, so all cells share one: the standard deviation of the differences, pooled over
the cells in which no run collapsed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cells import Cell
from ladder import ARMS, CLIMBERS, REFERENCE, ROLLOUTS, RUNGS, STUDY
from learning_tables import Runs, by_cell, collapsed
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]

LIMIT = 2.0  # standard errors, beyond which one arm beats another
NOTHING = "-"
CORRECTIONS = tuple(arm for arm in CLIMBERS if arm != "recipe")
NEW = ("int4", "bits3", "bits2", "reuse", "skip")  # rollouts of the newest weights, from int4 on
CENTERED = ("centered", "centered_recomputed")
OLD = ("int4_old8", "int4_old16")
COLLAPSED = 0.1  # a mean reward below this is that of no word at all
LEARNED = 0.55  # one below this is that of the base model, 0.527


class Difference(NamedTuple):
    """A mean of differences seed by seed, with its standard error.

    Attributes:
      mean: mean of the differences.
      error: its standard error; infinite if no spread is known.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if math.isinf(self.error) else f" ± {self.error:.3f}")

    @property
    def beaten(self) -> bool:
        """Tells whether it is below 0 by more than `LIMIT` standard errors."""
        return self.mean < -LIMIT * self.error


def grouped(cells: Mapping[str, Cell]) -> dict[tuple[str, str], dict[int, Cell]]:
    """Sorts runs by (rollout, arm) and by seed, in the order of the ladder."""
    return by_cell(cells, tuple(ROLLOUTS), tuple(ARMS))


def spread(cells: Mapping[str, Cell]) -> float:
    """Computes the standard deviation of differences to the reference, pooled over the cells.

    Args:
      cells: name -> content of a run's file.

    Returns:
      The standard deviation; infinite if no cell has two seeds.
    """
    found = grouped(cells)
    squares, degrees = 0.0, 0
    for cell, runs in found.items():
        if cell == REFERENCE or collapsed(runs):
            continue
        values = _differences(runs, found.get(REFERENCE, {}))
        if len(values) > 1:
            squares += statistics.variance(values) * (len(values) - 1)
            degrees += len(values) - 1
    return math.sqrt(squares / degrees) if degrees else math.inf


def _differences(runs: Runs, reference: Runs) -> list[float]:
    common = sorted(runs.keys() & reference.keys())
    return [runs[seed]["after"] - reference[seed]["after"] for seed in common]


def against(
    cells: Mapping[str, Cell], rollout: str, arm: str, to: tuple[str, str] = REFERENCE
) -> Difference | None:
    """Compares the rewards of two cells after training.

    Args:
      cells: name -> content of a run's file.
      rollout: the rollout of one cell.
      arm: its arm.
      to: (rollout, arm) of the other cell.

    Returns:
      The difference, or None without a common seed.
    """
    found = grouped(cells)
    values = _differences(found.get((rollout, arm), {}), found.get(to, {}))
    if not values:
        return None
    return Difference(statistics.mean(values), spread(cells) / math.sqrt(len(values)))


def mismatch(cells: Mapping[str, Cell], rollout: str) -> float | None:
    """Computes the mean |log-ratio| of the recomputed policy to a rollout, over all iterations.

    Args:
      cells: name -> content of a run's file.
      rollout: the rollout.

    Returns:
      The mean, or None without a run that recomputes.
    """
    runs = grouped(cells).get((rollout, "recomputed"), {})
    values = [value for run in runs.values() for value in run["curves"]["mismatch"]]
    return statistics.mean(values) if values else None


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training: a row for each rollout, a column for each arm."""
    rows: list[list[str]] = []
    for rollout in RUNGS:
        size = mismatch(cells, rollout)
        row = [f"`{rollout}`", NOTHING if size is None else f"{size:.1e}"]
        rows.append([*row, *(_verdict(against(cells, rollout, arm)) for arm in CLIMBERS)])
    rows.append(
        ["good enough on", "", *(f"{good(cells, arm)} of {len(RUNGS)}" for arm in CLIMBERS)]
    )
    rows.append(["CPU time of a run", "", *(f"{cost(cells, arm)}" for arm in CLIMBERS)])
    return markdown(["rollout", "mismatch", *(f"`{arm}`" for arm in CLIMBERS)], rows)


def _verdict(found: Difference | None) -> str:
    if found is None:
        return NOTHING
    return str(found) if found.beaten or math.isinf(found.error) else f"**{found}**"


def good(cells: Mapping[str, Cell], arm: str) -> int:
    """Counts the rollouts on which an arm is not beaten by exact rollouts."""
    found = [against(cells, rollout, arm) for rollout in RUNGS]
    return sum(one is not None and math.isfinite(one.error) and not one.beaten for one in found)


def cost(cells: Mapping[str, Cell], arm: str) -> str:
    """Formats the CPU seconds of an arm's runs, divided by those of `centered`.

    The rollouts have different costs, so each is compared with itself; the median is taken.
    """
    ratios: list[float] = []
    for rollout in RUNGS:
        own, base = (grouped(cells).get((rollout, one), {}) for one in (arm, "centered"))
        seeds = own.keys() & base.keys()
        ratios += [own[seed]["cpu_seconds"] / base[seed]["cpu_seconds"] for seed in seeds]
    return f"{statistics.median(ratios):.2f}" if ratios else NOTHING


def num_seeds(cells: Mapping[str, Cell]) -> str:
    """Formats the smallest and the largest number of seeds of a cell."""
    found = grouped(cells)
    counts = {len(found.get((rollout, arm), {})) for rollout in RUNGS for arm in CLIMBERS}
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def reference(cells: Mapping[str, Cell]) -> str:
    """Formats the mean reward after training on exact rollouts."""
    return f"{statistics.mean(run['after'] for run in grouped(cells)[REFERENCE].values()):.3f}"


def _mean(cells: Mapping[str, Cell], rollout: str, arm: str) -> float:
    return statistics.mean(run["after"] for run in grouped(cells)[rollout, arm].values())


def _start(cells: Mapping[str, Cell], rollout: str) -> str:
    """Formats the reward of a rollout's first images, which the arm has no part in."""
    runs = grouped(cells)[rollout, "centered"].values()
    return f"{statistics.mean(run['curves']['reward'][0] for run in runs):.2f}"


def _gap(cells: Mapping[str, Cell], rollout: str, arm: str, other: str) -> float:
    found = against(cells, rollout, arm, (rollout, other))
    assert found is not None
    return found.mean


def _beaten(cells: Mapping[str, Cell], rollout: str, arm: str) -> bool:
    found = against(cells, rollout, arm)
    assert found is not None
    return found.beaten


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "ladder_runs": lambda cells: str(len(cells)),
    "ladder_seeds": num_seeds,
    "ladder_spread": lambda cells: f"{spread(cells):.3f}",
    "ladder_reference": reference,
    "ladder_rewards": rewards,
    "ladder_bf16_start": lambda cells: _start(cells, "bf16"),
    "ladder_bits2_start": lambda cells: _start(cells, "bits2"),
    "ladder_skip_start": lambda cells: _start(cells, "skip"),
    "ladder_bits2_gap": lambda cells: f"{_gap(cells, 'bits2', 'recomputed', 'centered'):.3f}",
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "ladder_recipe_fails": lambda cells: all(
        _mean(cells, rollout, "recipe") < (COLLAPSED if rollout in NEW else LEARNED)
        for rollout in (*NEW, *OLD)
    ),
    "ladder_corrections_hold": lambda cells: (
        not any(
            _beaten(cells, rollout, arm)
            for rollout in ("bf16", "int8", "int4", "bits3")
            for arm in CORRECTIONS
        )
    ),
    "ladder_reuse_behind": lambda cells: (
        {arm for arm in CORRECTIONS if _beaten(cells, "reuse", arm)} == {"centered", "recomputed"}
    ),
    "ladder_old_weights": lambda cells: (
        [arm for arm in CORRECTIONS if _beaten(cells, "int4_old8", arm)] == ["recomputed"]
        and [arm for arm in CORRECTIONS if not _beaten(cells, "int4_old16", arm)] == ["recomputed"]
    ),
    "ladder_skip_fails": lambda cells: all(_beaten(cells, "skip", arm) for arm in CORRECTIONS),
    "ladder_centered_is_cheap": lambda cells: all(
        float(cost(cells, arm)) >= 0.98 for arm in CORRECTIONS
    ),
    "ladder_guard_leads": lambda cells: (
        good(cells, "guard")
        == good(cells, "recomputed")
        == good(cells, "centered_recomputed")
        == good(cells, "centered") + 1
        and all(
            float(cost(cells, "guard")) < float(cost(cells, arm))
            for arm in ("recomputed", "centered_recomputed")
        )
    ),
    "ladder_guard_is_older": lambda cells: (
        _gap(cells, "int4_old16", "centered", "guard") > 0.02
        and _gap(cells, "int4_old16", "recomputed", "guard") > 0.02
    ),
    "ladder_centered_in_bf16": lambda cells: not _beaten(cells, "bf16", "centered"),
    "ladder_bits2_turns": lambda cells: _gap(cells, "bits2", "recomputed", "centered") > 0.02,
}

"""The table of docs/evidence.md about rollouts that use blocks again, and pools."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from cached import ARMS, ROLLOUT, STUDY
from cells import Cell
from estimates import NOTHING, Estimate, Runs, after, by_cell, collapsed, difference
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]
LEAST = -0.02  # of the rule


def runs_of(cells: Mapping[str, Cell], arm: str) -> Runs:
    """Returns the runs of an arm by seed."""
    return by_cell(cells, (ROLLOUT,), (arm,)).get((ROLLOUT, arm), {})


def gap(cells: Mapping[str, Cell], arm: str) -> Estimate:
    """Compares an arm with exact rollouts, seed by seed."""
    found = difference(runs_of(cells, arm), runs_of(cells, "exact"))
    assert found is not None, f"no seed of {arm} has an exact run"
    return found


def rewards(cells: Mapping[str, Cell]) -> str:
    """Makes the table of rewards after training, with the cost of the rollouts."""
    exact = runs_of(cells, "exact")
    rows = []
    for arm in ARMS:
        runs = runs_of(cells, arm)
        if not runs:
            continue
        less = NOTHING if arm == "exact" else gap(cells, arm).signed
        cpu = statistics.median(
            runs[seed]["cpu_seconds"] / exact[seed]["cpu_seconds"] for seed in runs
        )
        fell = f"{collapsed(runs)} of {len(runs)}"
        numbers = (f"{mean(runs, 'mismatch'):.1e}", f"{mean(runs, 'clip_fraction'):.0%}")
        rows.append(
            [
                f"`{arm}`",
                f"{blocks(runs, arm):.2f}",
                *numbers,
                after(runs),
                less,
                fell,
                f"{cpu:.2f}",
            ]
        )
    header = ["arm", "blocks", "mismatch", "clipped", "reward after", "less `exact`", "fell"]
    return markdown([*header, "CPU time of a run"], rows)


def mean(runs: Runs, curve: str) -> float:
    """Returns the mean of a metric over all steps of an arm; 0 where it has none."""
    values = [value for run in runs.values() for value in run["curves"].get(curve, [0.0])]
    return statistics.fmean(values)


def blocks(runs: Runs, arm: str) -> float:
    """Returns the block evaluations of all samples that are drawn, over those of `exact`."""
    drawn = (2 if "rollout.n=24" in ARMS[arm] else 1) * (1 - mean(runs, "saved_blocks"))
    return drawn + ("rollout.redraw=true" in ARMS[arm])


def holds(cells: Mapping[str, Cell], arm: str) -> bool:
    """Says whether an arm passes the rule's two conditions on rewards."""
    return gap(cells, arm).mean > LEAST and collapsed(runs_of(cells, arm)) == 0


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {"cached": rewards}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "cached_inside_holds": lambda cells: holds(cells, "inside"),
    "cached_outside_holds": lambda cells: holds(cells, "outside"),
    "cached_scouts_gain": lambda cells: all(
        gap(cells, arm).mean > 0.02 for arm in ("pool", "scouts")
    ),
    "cached_recipe_collapses": lambda cells: collapsed(runs_of(cells, "inside_recipe")) == 3,
}

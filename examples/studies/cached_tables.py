"""The table and the figure of docs/evidence.md about rollouts that use blocks again, and pools.

python examples/studies/cached_tables.py    # draws docs/figures/cached.svg
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from cached import ARMS, ROLLOUT, STUDY
from cells import Cell, load
from learning_figures import STYLE
from learning_tables import NOTHING, Estimate, Runs, after, by_cell, collapsed, difference
from matplotlib.figure import Figure
from tables import DOCS, markdown

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


def draw(cells: Mapping[str, Cell], path: Path) -> None:
    """Draws the reward after training of each run against block evaluations and CPU seconds."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": STUDY}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for marker, arm in zip("os^vDPX", ARMS, strict=True):
            runs = runs_of(cells, arm)
            rewards_after = [run["after"] for run in runs.values()]
            seconds = [run["cpu_seconds"] for run in runs.values()]
            left.plot([blocks(runs, arm)] * len(runs), rewards_after, marker, label=arm, ms=7)
            right.plot(seconds, rewards_after, marker, ms=7)
        left.set(xlabel="block evaluations over those of exact", ylabel="held-out reward")
        right.set(xlabel="CPU seconds of a run")
        left.legend()
        figure.savefig(path, metadata={"Date": None})


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {"cached": rewards}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "cached_inside_holds": lambda cells: holds(cells, "inside"),
    "cached_outside_holds": lambda cells: holds(cells, "outside"),
    "cached_scouts_gain": lambda cells: all(
        gap(cells, arm).mean > 0.02 for arm in ("pool", "scouts")
    ),
    "cached_recipe_collapses": lambda cells: collapsed(runs_of(cells, "inside_recipe")) == 3,
}

if __name__ == "__main__":
    draw(load(STUDY), DOCS / "figures" / f"{STUDY}.svg")

"""Draws docs/figures/ladder.svg from the results of the ladder of rollouts.

    python examples/studies/ladder_figures.py [--output FOLDER]

Colours and background are those of learning_figures.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from cells import Cell, load
from ladder import CLIMBERS, REFERENCE, RUNGS, STUDY
from ladder_tables import against, grouped, mismatch
from learning_figures import INK, STYLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import DOCS

COLOURS = {
    "centered": "#2fa572",
    "recomputed": "#3d8fd1",
    "centered_recomputed": "#9a7bd0",
    "guard": "#d09a1e",
    "recipe": "#d95f4b",
}


def draw(cells: Mapping[str, Cell], path: Path) -> None:
    """Draws the reward after training against the mismatch of the rollout.

    A line and its bars are an arm's means and their own standard errors; a dot is a run
    that ends below its start.

    Args:
      cells: the cells of the study.
      path: the file to write.
    """
    sizes = {rollout: size for rollout in RUNGS if (size := mismatch(cells, rollout))}
    rungs = sorted(sizes, key=lambda rollout: sizes[rollout])
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": STUDY}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        _arms(axes, cells, rungs)
        exact = grouped(cells)[REFERENCE].values()
        for reward, style in (("before", "--"), ("after", ":")):
            axes.axhline(
                statistics.mean(run[reward] for run in exact),
                color=INK,
                linewidth=1,
                linestyle=style,
            )
        axes.set_xticks(
            range(len(rungs)), [f"{rollout}\n{sizes[rollout]:.1e}" for rollout in rungs]
        )
        axes.set_xlabel("rollout, and its mean |log-ratio|")
        axes.set_ylabel("held-out reward after training\n(dashed: before, dotted: exact rollouts)")
        axes.legend(loc="lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _arms(axes: Axes, cells: Mapping[str, Cell], rungs: Sequence[str]) -> None:
    found = grouped(cells)
    for number, arm in enumerate(CLIMBERS):
        points = [
            (place + 0.08 * (number - len(CLIMBERS) // 2), rollout)
            for place, rollout in enumerate(rungs)
            if (rollout, arm) in found
        ]
        rewards = [[run["after"] for run in found[on, arm].values()] for _, on in points]
        errors = [one.error if (one := against(cells, on, arm)) else 0 for _, on in points]
        axes.errorbar(
            [place for place, _ in points],
            [statistics.mean(each) for each in rewards],
            yerr=errors,
            fmt="o-",
            linewidth=1,
            markersize=4,
            capsize=2,
            color=COLOURS[arm],
            label=arm,
        )
        for place, on in points:
            ends = [run["after"] for run in found[on, arm].values() if run["after"] < run["before"]]
            axes.plot([place] * len(ends), ends, ".", markersize=3, color=COLOURS[arm])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    draw(load(STUDY), parser.parse_args(arguments).output / "ladder.svg")


if __name__ == "__main__":
    main()

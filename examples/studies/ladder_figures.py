"""Draws docs/figures/ladder.svg from the results of the ladder of rollouts.

    python examples/studies/ladder_figures.py [--output FOLDER]

Colours and background are those of learning_figures.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from cells import Cell, load
from ladder import CLIMBERS, REFERENCE, RUNGS, STUDY
from ladder_tables import grouped, mismatch, spread
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
    """Draws the reward after training against the mismatch of the rollout, a line for each arm.

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
    deviation = spread(cells)
    for number, arm in enumerate(CLIMBERS):
        points = [(place, found.get((rollout, arm), {})) for place, rollout in enumerate(rungs)]
        shown = [(place, runs) for place, runs in points if runs]
        means = [statistics.mean(run["after"] for run in runs.values()) for _, runs in shown]
        errors = [deviation / math.sqrt(len(runs)) for _, runs in shown]
        axes.errorbar(
            [place + 0.08 * (number - len(CLIMBERS) // 2) for place, _ in shown],
            means,
            yerr=errors if math.isfinite(deviation) else None,
            fmt="o-",
            linewidth=1,
            markersize=4,
            capsize=2,
            color=COLOURS[arm],
            label=arm,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    draw(load(STUDY), parser.parse_args(arguments).output / "ladder.svg")


if __name__ == "__main__":
    main()

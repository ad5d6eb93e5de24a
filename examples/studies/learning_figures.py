"""Draws docs/figures/learning.svg from the learning study's results.

    python examples/studies/learning_figures.py [--output FOLDER]

The background is transparent and the ink a middle grey, to be legible on light and dark pages.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from cells import Cell, load
from learning_tables import REFERENCE, STUDY, Runs, after, by_cell
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import DOCS

INK = "#7d8590"
COLOURS = {
    "bypass": INK,
    "recipe": "#d95f4b",
    "calibrated": "#d09a1e",
    "recomputed": "#3d8fd1",
    "recomputed_tight": "#e07fb0",
    "is": "#9a7bd0",
    "is_rs": "#2fa572",
    "guard": "#30a0a8",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": STUDY,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
SMOOTHED = 8  # iterations that a point of a curve is the mean of


def draw(cells: Mapping[str, Cell], path: Path) -> None:
    """Draws the figure.

    Left: reward on held-out words after training, with intervals and single runs. Right: reward by
    iteration.

    Args:
      cells: the cells of the study.
      path: the file to write.
    """
    grouped = by_cell(cells)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.9 + 0.27 * len(grouped)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        _rewards(left, grouped)
        _curves(right, grouped)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _rewards(axes: Axes, grouped: Mapping[tuple[str, str], Runs]) -> None:
    for row, ((_, arm), runs) in enumerate(grouped.items()):
        found = after(runs)
        colour = COLOURS[arm]
        rewards = [run["after"] for run in runs.values()]
        axes.plot(rewards, [row] * len(runs), "|", color=colour, alpha=0.6)
        error = None if math.isinf(found.half) else found.half
        axes.errorbar(found.mean, row, xerr=error, fmt="o", color=colour, capsize=3, markersize=5)
    any_run = next(run for runs in grouped.values() for run in runs.values())
    axes.axvline(any_run["before"], color=INK, linewidth=1, linestyle="--")
    if REFERENCE in grouped:
        axes.axvline(after(grouped[REFERENCE]).mean, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(grouped)), [f"{rollout}  {arm}" for rollout, arm in grouped])
    axes.invert_yaxis()
    axes.set_xlabel("held-out reward after training (dashed: before, dotted: reference)")


def _curves(axes: Axes, grouped: Mapping[tuple[str, str], Runs], rollout: str = "int4") -> None:
    shown = {
        cell: runs for cell, runs in grouped.items() if cell == REFERENCE or cell[0] == rollout
    }
    for (kind, arm), runs in shown.items():
        curves = [run["curves"]["reward"] for run in runs.values()]
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        smooth = [statistics.mean(mean[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(mean))]
        axes.plot(range(1, len(mean) + 1), smooth, color=COLOURS[arm], label=f"{kind}  {arm}")
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"reward of the rollouts (mean of {SMOOTHED} iterations)")
    axes.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    draw(load(STUDY), parser.parse_args(arguments).output / "learning.svg")


if __name__ == "__main__":
    main()

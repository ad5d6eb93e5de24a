"""Draws docs/figures/time_to_reward.svg from the results of the time to reward.

python examples/studies/time_to_reward_figures.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from cells import Cell, load
from learning_figures import INK, STYLE
from matplotlib.figure import Figure
from tables import DOCS
from time_to_reward_arms import GOES, PEER_ARMS, REPEATS, STUDY, TARGET
from time_to_reward_tables import clocked, runs_of

SHOWN = tuple(arm for arm in GOES["jobs"] if arm not in REPEATS)


def draw(cells: Mapping[str, Cell], path: Path) -> None:
    """Draws the held-out reward against CPU seconds: a line for each arm, the mean of its seeds.

    Seconds are iterations times the median seconds of one, measured for all arms in one go.

    Args:
      cells: the results; all runs of an arm have the same iterations.
      path: the file to write.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(TARGET, color=INK, linewidth=0.7, linestyle=":")
        for number, arm in enumerate(SHOWN):
            runs = runs_of(cells, arm)
            measured = clocked(cells, "jobs", arm).get("iteration_cpu_seconds")
            if runs and measured:
                seconds = [statistics.median(measured) * step for step in runs[0]["steps"]]
                curves = zip(*(run["reward"] for run in runs), strict=True)
                rewards = [statistics.mean(values) for values in curves]
                dashes = "--" if arm in PEER_ARMS else "-"
                axes.plot(seconds, rewards, dashes, color=f"C{number}", label=arm)
        axes.set_xlabel("CPU seconds of training")
        axes.set_ylabel("held-out reward")
        if cells:
            axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    draw(load(STUDY), parser.parse_args(arguments).output / "time_to_reward.svg")


if __name__ == "__main__":
    main()

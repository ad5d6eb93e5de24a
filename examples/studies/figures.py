"""Draws docs/figures/ladder.svg, cached.svg and time_to_reward.svg from the studies' results.

    python examples/studies/figures.py [--output FOLDER]

The background is transparent and the ink a middle grey, to be legible on light and dark pages.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import cached
import cached_tables
import matplotlib
from cells import Cell, load
from ladder import CLIMBERS, REFERENCE, RUNGS, STUDY
from ladder_tables import against, grouped, mismatch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import DOCS
from time_to_reward_arms import GOES, PEER_ARMS, REPEATS, TARGET
from time_to_reward_arms import STUDY as TIMES
from time_to_reward_tables import clocked, runs_of

INK = "#7d8590"
STYLE = {
    "svg.fonttype": "none",
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
COLOURS = {
    "centered": "#2fa572",
    "recomputed": "#3d8fd1",
    "centered_recomputed": "#9a7bd0",
    "guard": "#d09a1e",
    "recipe": "#d95f4b",
}
TIMED = tuple(arm for arm in GOES["jobs"] if arm not in REPEATS)


@contextmanager
def figure_of(study: str, folder: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Gives an empty figure in the style of the pages, and writes it to FOLDER/STUDY.svg."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": study}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{study}.svg", transparent=True, metadata={"Date": None})


def draw_ladder(cells: Mapping[str, Cell], folder: Path) -> None:
    """Draws the reward after training against the mismatch of the rollout.

    A line and its bars are an arm's means and their own standard errors; a dot is a run
    that ends below its start.
    """
    sizes = {rollout: size for rollout in RUNGS if (size := mismatch(cells, rollout))}
    rungs = sorted(sizes, key=lambda rollout: sizes[rollout])
    with figure_of(STUDY, folder, (9, 4.5)) as figure:
        axes = figure.subplots()
        _arms(axes, cells, rungs)
        exact = grouped(cells)[REFERENCE].values()
        for reward, style in (("before", "--"), ("after", ":")):
            height = statistics.mean(run[reward] for run in exact)
            axes.axhline(height, color=INK, linewidth=1, linestyle=style)
        names = [f"{rollout}\n{sizes[rollout]:.1e}" for rollout in rungs]
        axes.set_xticks(range(len(rungs)), names)
        axes.set_xlabel("rollout, and its mean |log-ratio|")
        axes.set_ylabel("held-out reward after training\n(dashed: before, dotted: exact rollouts)")
        axes.legend(loc="lower left")


def _arms(axes: Axes, cells: Mapping[str, Cell], rungs: Sequence[str]) -> None:
    runs = grouped(cells)
    for number, arm in enumerate(CLIMBERS):
        points = [
            (place + 0.08 * (number - len(CLIMBERS) // 2), rollout)
            for place, rollout in enumerate(rungs)
            if (rollout, arm) in runs
        ]
        rewards = [[run["after"] for run in runs[on, arm].values()] for _, on in points]
        gaps = [against(cells, on, arm) for _, on in points]
        axes.errorbar(
            [place for place, _ in points],
            [statistics.mean(of_cell) for of_cell in rewards],
            yerr=[gap.error if gap else 0 for gap in gaps],
            fmt="o-",
            linewidth=1,
            markersize=4,
            capsize=2,
            color=COLOURS[arm],
            label=arm,
        )
        for place, on in points:
            ends = [run["after"] for run in runs[on, arm].values() if run["after"] < run["before"]]
            axes.plot([place] * len(ends), ends, ".", markersize=3, color=COLOURS[arm])


def draw_cached(cells: Mapping[str, Cell], folder: Path) -> None:
    """Draws the reward after training of each run against block evaluations and CPU seconds."""
    with figure_of(cached.STUDY, folder, (9, 4)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for marker, arm in zip("os^vDPX", cached.ARMS, strict=True):
            runs = cached_tables.runs_of(cells, arm)
            rewards = [run["after"] for run in runs.values()]
            blocks = cached_tables.blocks(runs, arm)
            left.plot([blocks] * len(runs), rewards, marker, label=arm, ms=7)
            right.plot([run["cpu_seconds"] for run in runs.values()], rewards, marker, ms=7)
        left.set(xlabel="block evaluations over those of exact", ylabel="held-out reward")
        right.set(xlabel="CPU seconds of a run")
        left.legend()


def draw_times(cells: Mapping[str, Cell], folder: Path) -> None:
    """Draws the held-out reward against CPU seconds: a line for each arm, the mean of its seeds.

    Seconds are iterations times the median seconds of one, measured for all arms in one go.
    """
    with figure_of(TIMES, folder, (7, 3.6)) as figure:
        axes = figure.subplots()
        axes.axhline(TARGET, color=INK, linewidth=0.7, linestyle=":")
        for number, arm in enumerate(TIMED):
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
        axes.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    folder = parser.parse_args(arguments).output
    draw_ladder(load(STUDY), folder)
    draw_cached(load(cached.STUDY), folder)
    draw_times(load(TIMES), folder)


if __name__ == "__main__":
    main()

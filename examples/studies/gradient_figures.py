"""Draws docs/figures/gradient_*.svg from the gradient study's results.

    python examples/studies/gradient_figures.py [--output FOLDER] [--format svg]

The background is transparent and the ink a middle grey, to be legible on light and dark pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from cells import load
from estimators import REFERENCE_CLIP
from gradient_corrections import SWEEP
from gradient_image_rows import ROLLOUTS, relative
from gradient_region_rows import COLUMNS, FACTORS, SWEPT, mean, problems, rollouts_own
from gradient_rows import MISMATCHES, Cells, cell
from gradient_study import STUDY
from tables import DOCS

INK = "#7d8590"
COLOURS = {
    "bf16": "#2f81f7",
    "int8": "#39a0a8",
    "int4": "#e5534b",
    "rounding": "#57a85a",
    "guidance": "#b083f0",
    "stale_1": "#c9a227",
    "stale_8": "#b5622b",
}
SHOWN = ("bf16", "int4", "rounding", "guidance", "stale_1", "stale_8")  # of the sweep of clips
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradient",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.transparent": True,
}


def clip_sweep(cells: Cells) -> Any:
    """Draws the effect of the width of the clip band, in units of the mismatch's own scale."""
    panels = (
        ("gated", "share of the gradient lost"),
        ("bias", "bias over length of the truth"),
        ("chance", "gradient when rewards are chance"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
    for axis, (quantity, title) in zip(axes, panels, strict=True):
        for name in SHOWN:
            found = cell(cells, name)["estimators"]
            values = [_value(found[f"bypass_clip_{multiple:g}"][quantity]) for multiple in SWEEP]
            axis.plot(
                SWEEP, values, color=COLOURS[name], marker="o", markersize=3, label=MISMATCHES[name]
            )
            own = REFERENCE_CLIP / cell(cells, name)["calibration"]["floor"]
            axis.plot(
                own,
                _value(found["bypass"][quantity]),
                color=COLOURS[name],
                marker="D",
                markersize=6,
            )
        axis.set(xscale="log", xlabel="clip_ratio over the floor", title=title, ylim=(0, None))
        axis.grid(visible=True)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN)
    )
    return figure


def directions(cells: Cells) -> Any:
    """Draws the mean cosine with the true gradient, and its range, before and after an update."""
    chosen = {
        "bypass_plain_published": "bypass\nclip 1e-4",
        "bypass_plain_none": "bypass",
        "decoupled_plain_none": "recomputed",
        "bypass_centered_none": "centered\nbypass",
        "decoupled_centered_none": "centered\nrecomputed",
        "bypass_centered_auto": "centered\nbypass, auto:4",
        "guard_bypass_plain_none": "Guard\nbypass",
    }
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.2), layout="constrained", sharex=True)
    titles = {"first": "before an update", "second": "after one update"}
    for axis, (update, title) in zip(axes, titles.items(), strict=True):
        for offset, (mismatch, text) in enumerate(COLUMNS.items()):
            colour = COLOURS[mismatch]
            for place, name in enumerate(chosen):
                found = [one.value for one in problems(cells, mismatch, name, update)]
                centre = place + 0.12 * (offset - (len(COLUMNS) - 1) / 2)
                axis.vlines(centre, min(found), max(found), color=colour, linewidth=3, alpha=0.4)
                axis.plot(
                    centre,
                    fmean(found),
                    color=colour,
                    marker="o",
                    markersize=4,
                    linestyle="none",
                    label=text if place == 0 else None,
                )
        axis.set_xticks(range(len(chosen)), chosen.values(), fontsize=8)
        axis.set(ylabel="cosine with the truth", title=title, ylim=(-1, 1.05))
        axis.grid(visible=True, axis="y")
        axis.axhline(0, color=INK, linewidth=0.8)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLUMNS)
    )
    return figure


def sweep(cells: Cells) -> Any:
    """Draws the cosine with either policy's gradient against the size of the weight error."""
    colours = dict(zip(SWEPT, list(COLOURS.values()), strict=False))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    panels = {"cosine": "our policy's gradient", "rollout_cosine": "the rollout's own gradient"}
    factors = [float(factor) for factor in FACTORS.values()]
    for axis, (quantity, title) in zip(axes, panels.items(), strict=True):
        for name, text in SWEPT.items():
            found = [mean(cells, m, name, "first", quantity) for m in FACTORS]
            dashes = "--" if name.startswith("decoupled") else "-"
            axis.errorbar(
                factors,
                [one.value for one in found],
                [one.error for one in found],
                color=colours[name],
                linestyle=dashes,
                marker="o",
                markersize=3,
                linewidth=1,
                label=text,
            )
        axis.set(xscale="log", xlabel="weight error, times that of int4", title=title)
        axis.set_xticks(factors, FACTORS.values())
        axis.minorticks_off()
        axis.grid(visible=True)
    both = [rollouts_own(cells, m) for m in FACTORS]
    axes[0].plot(
        factors,
        [one.value for one in both],
        color=INK,
        linestyle=":",
        label="the rollout's own gradient",
    )
    axes[0].set_ylabel("cosine")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def images(cells: Cells) -> Any:
    """Draws the slope of the reward of the bundled model, over that of exact rollouts."""
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    colours = {"bf16": "bf16", "int4": "int4", "bits2": "stale_8", "stale_8": "guidance"}
    for offset, (rollout, text) in enumerate(ROLLOUTS.items()):
        found = [relative(cells, rollout, name) for name in SWEPT]
        axis.errorbar(
            [place + 0.12 * (offset - (len(ROLLOUTS) - 1) / 2) for place in range(len(SWEPT))],
            [one.value for one in found],
            [one.error for one in found],
            color=COLOURS[colours[rollout]],
            fmt="o",
            markersize=4,
            linewidth=1,
            label=text,
        )
    axis.set_xticks(range(len(SWEPT)), [text.replace(", ", "\n") for text in SWEPT.values()])
    axis.set(ylabel="slope of the reward over\nthat of exact rollouts")
    axis.axhline(1, color=INK, linewidth=0.8)
    axis.grid(visible=True, axis="y")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _value(found: Any) -> float:
    if found is None:
        return float("nan")
    return found[0] if isinstance(found, list) else found


FIGURES = {
    "gradient_clip": clip_sweep,
    "gradient_directions": directions,
    "gradient_sweep": sweep,
    "gradient_image": images,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DOCS / "figures")
    parser.add_argument("--format", default="svg", help="such as png, to look at them")
    options = parser.parse_args(arguments)
    cells = load(STUDY)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(cells)
            metadata = {"Date": None} if options.format == "svg" else None
            path = options.output / f"{name}.{options.format}"
            figure.savefig(path, metadata=metadata)
            plt.close(figure)


if __name__ == "__main__":
    main()

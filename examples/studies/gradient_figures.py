"""Draws docs/figures/gradient_*.svg from the gradient study's results.

    python examples/studies/gradient_figures.py [--output FOLDER]

The background is transparent and the ink a middle grey, to be legible on light and dark pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from cells import load
from estimators import REFERENCE_CLIP
from gradient_corrections import SWEEP
from gradient_tables import MISMATCHES, NAMES, STUDY, Cells, cell
from tables import PAGE

INK = "#7d8590"
COLOURS = {
    "bf16": "#2f81f7",
    "int4": "#e5534b",
    "rounding": "#57a85a",
    "guidance": "#b083f0",
    "stale_1": "#c9a227",
    "stale_8": "#b5622b",
}
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
        for name in COLOURS:
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
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS)
    )
    return figure


def directions(cells: Cells) -> Any:
    """Draws the cosine with the true gradient of the estimators that differ."""
    chosen = (
        "bypass",
        "bypass_calibrated",
        "bypass_auto_k1",
        "recomputed",
        "decoupled_token_mean",
        "decoupled_sequence_sum",
        "reinforce_sequence",
        "guard",
        "guard_calibrated",
    )
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for name, offset in zip(COLOURS, range(len(COLOURS)), strict=True):
        found = [cell(cells, name)["estimators"][key]["cosine"] for key in chosen]
        places = [place + 0.12 * (offset - (len(COLOURS) - 1) / 2) for place in range(len(chosen))]
        values, errors = zip(
            *((float("nan"), 0.0) if one is None else one for one in found), strict=True
        )
        axis.errorbar(
            places,
            values,
            errors,
            color=COLOURS[name],
            fmt="o",
            markersize=4,
            linewidth=1,
            label=MISMATCHES[name],
        )
    labels = [
        NAMES[key].replace("` `", ", ").replace("`", "").replace(", ", "\n") for key in chosen
    ]
    axis.set_xticks(range(len(chosen)), labels, fontsize=8)
    axis.set(ylabel="cosine with the truth")
    axis.grid(visible=True, axis="y")
    axis.axhline(1, color=INK, linewidth=0.8)
    axis.axhline(0, color=INK, linewidth=0.8)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    return figure


def _value(found: Any) -> float:
    if found is None:
        return float("nan")
    return found[0] if isinstance(found, list) else found


FIGURES = {"gradient_clip": clip_sweep, "gradient_directions": directions}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=PAGE.parent / "figures")
    output = parser.parse_args(arguments).output
    cells = load(STUDY)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(cells)
            figure.savefig(output / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()

"""What a calibration leaves: tables on the terminal, a picture, `calibration.json`, and a YAML for
training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowgrpo_rc.calibration.causes import Diagnosis
from flowgrpo_rc.calibration.choice import Bound, Settings
from flowgrpo_rc.calibration.measure import Mismatch, finite
from flowgrpo_rc.files import write_atomic

GROUP = "calibration"
WIDTH = 110  # of the tables at least: a narrower one would cut its numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """mismatches: that of the engine at the configured guidance, over all samples, comes first;
    clipped: the share of steps outside of the loss's bound before any update, by its value;
    subject: what was calibrated."""

    subject: dict[str, Any]
    mismatches: Sequence[Mismatch]
    bound: Bound | None
    clipped: dict[float, float]
    diagnosis: Diagnosis
    settings: Settings

    def json(self) -> dict[str, Any]:
        diagnosis = self.diagnosis
        return {
            "subject": self.subject,
            "mismatch": [
                {
                    "guidance": found.guidance,
                    "precision": found.precision,
                    "sampler": "engine" if found.engine else "copy of the trainer's network",
                    **{name: finite(value) for name, value in found.summary().items()},
                    "by_timestep": dict(
                        zip(found.timesteps, map(finite, found.by_timestep()), strict=True)
                    ),
                }
                for found in self.mismatches
            ],
            "bound": None if self.bound is None else self.bound.key,
            "clipped_before_update": {f"{value:g}": share for value, share in self.clipped.items()},
            "diagnosis": {
                "cause": diagnosis.cause,
                "verdict": diagnosis.sentence(),
                "mismatch": finite(diagnosis.mismatch),
                "floor": finite(diagnosis.floor),
                "as_recorded": finite(diagnosis.as_recorded),
                "trials": [
                    asdict(trial) | {"residual": finite(trial.residual)}
                    for trial in diagnosis.trials
                ],
            },
            "settings": self.settings.values,
            "reason": self.settings.reason,
            "notes": list(self.settings.notes),
        }

    def header(self) -> list[str]:
        """What a reader of the YAML should know."""
        subject = self.subject
        return [
            f"Measured with {subject['engine']}, {subject['precision']}, on {subject['model']}, "
            "guidance "
            f"{subject['guidance']:g}, {subject['samples']} samples; noise floor "
            f"{self.mismatches[0].scale():.1e}.",
            f"{self.diagnosis.sentence()}.",
        ]


class Folder:
    """The folder of one result, `root`; the YAML is `root/calibration/NAME.yaml`."""

    def __init__(self, root: Path, name: str) -> None:
        if not name.isidentifier():
            raise ValueError(
                f"--name {name}: give letters, digits and underscores, for +{GROUP}=NAME"
            )
        self.root, self.name = root, name
        self.json, self.picture = root / "calibration.json", root / "mismatch.png"
        self.yaml = root / GROUP / f"{name}.yaml"

    def check(self, *, overwrite: bool) -> None:
        """ValueError where another result would be lost."""
        there = [str(path) for path in (self.json, self.picture, self.yaml) if path.exists()]
        if there and not overwrite:
            raise ValueError(
                f"--out {self.root} holds a result already ({', '.join(there)}): give another "
                "folder, or --overwrite"
            )

    def write(self, found: Calibration) -> None:
        self.yaml.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.json, (json.dumps(found.json(), indent=2) + "\n").encode())
        draw(found, self.picture)
        write_atomic(self.yaml, found.settings.yaml(found.header()).encode())


def draw(found: Calibration, path: Path) -> None:
    """Mean |difference| by timestep: one colour a precision, dashed at the other guidance, crosses
    for copies.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colors = {
        name: f"C{i}"
        for i, name in enumerate(dict.fromkeys(one.precision for one in found.mismatches))
    }
    configured = found.mismatches[0].guidance
    for one in found.mismatches:
        axes.plot(
            one.timesteps,
            [value if value > 0 else float("nan") for value in one.by_timestep()],
            label=one.name,
            color=colors[one.precision],
            linestyle="-" if one.guidance == configured else "--",
            marker="o" if one.engine else "x",
        )
    bounds_mismatch = found.bound is not None and found.bound.on_mismatch
    for clip in found.clipped if bounds_mismatch else ():
        axes.axhline(clip, color="0.45", linestyle=":", linewidth=1)
        axes.annotate(
            f" clip_ratio {clip:g}",
            (1, clip),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="center",
        )
    axes.set(xlabel="timestep", ylabel="mean |log-prob of trainer - of sampler|", yscale="log")
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, edgecolor="none")
    figure.savefig(path, dpi=150)


def show(found: Calibration, folder: Folder) -> None:
    """Print the tables, the verdict and what to do with the settings."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(mismatch_table(found.mismatches))
    console.print(trial_table(found.diagnosis))
    for line in (
        *([] if found.bound is None else [clipped(found.bound, found.clipped)]),
        found.diagnosis.sentence(),
        found.settings.reason,
        *found.settings.notes,
        f"{folder.json}, {folder.picture}, {folder.yaml}",
        f"train with them: flowgrpo-rc train --config-dir {folder.root} +{GROUP}={folder.name} ...",
    ):
        console.print(line, markup=False, soft_wrap=True)


def clipped(bound: Bound, shares: Mapping[float, float]) -> str:
    """Which share of the steps is beyond some bounds, in words."""
    listed = ", ".join(
        f"{100 * share:.1f}% with {bound.key}={value:g}" for value, share in shares.items()
    )
    return f"beyond the bound before any update, in bypass mode: {listed}"


def mismatch_table(mismatches: Sequence[Mismatch]) -> Table:
    """Of each sampler, in its precision and at its guidance."""
    table = Table(
        title="|log-prob of trainer - of sampler| before any update", title_justify="left"
    )
    table.add_column("timestep", justify="right")
    for one in mismatches:
        table.add_column("\n".join(one.name.split()), justify="right")
    columns = [one.by_timestep() for one in mismatches]
    for timestep, *row in zip(mismatches[0].timesteps, *columns, strict=True):
        table.add_row(str(timestep), *map(number, row))
    table.add_section()
    summaries = [one.summary() for one in mismatches]
    for name in summaries[0]:
        table.add_row(name, *(number(summary[name]) for summary in summaries))
    return table


def trial_table(diagnosis: Diagnosis) -> Table:
    """Of each fault that was tried, what is left of the mismatch."""
    table = Table(title="replayed with a fault on our side", title_justify="left")
    for name in ("cause", "fault", "difference from the engine"):
        table.add_column(name, justify="left" if name != "difference from the engine" else "right")
    table.add_row("", "none", number(diagnosis.as_recorded))
    table.add_section()
    for trial in diagnosis.trials:
        style = "bold" if trial is diagnosis.explanation else ""
        table.add_row(trial.cause, trial.fault, number(trial.residual), style=style)
    return table


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

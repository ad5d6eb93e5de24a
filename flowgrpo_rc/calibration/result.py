"""The result of a calibration: tables on the terminal, a picture, JSON, and a YAML for training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowgrpo_rc.calibration.caches import CacheTrial
from flowgrpo_rc.calibration.causes import Diagnosis
from flowgrpo_rc.calibration.choice import Bound, Settings
from flowgrpo_rc.calibration.measure import Mismatch
from flowgrpo_rc.calibration.tails import TailTrial
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.records.metrics_file import as_json

GROUP = "calibration"
WORDS = ("cause", "fault", "tail")  # columns of words; numbers stand on the right
WIDTH = 110  # of the tables at least: a narrower one would cut its numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The measurements, and the settings that follow from them."""

    subject: dict[str, Any]  # what was calibrated
    # The first is the engine's, at the configured guidance and over all samples.
    mismatches: Sequence[Mismatch]
    bound: Bound | None
    clipped: dict[float, float]  # value of the bound -> share of steps outside it before any update
    diagnosis: Diagnosis
    settings: Settings
    tails: Sequence[TailTrial] = ()  # empty unless they were tried
    caches: Sequence[CacheTrial] = ()  # likewise

    def json(self) -> dict[str, Any]:
        """Returns the content of calibration.json."""
        diagnosis = self.diagnosis
        return {
            "subject": self.subject,
            "mismatch": [
                {
                    "guidance": found.guidance,
                    "precision": found.precision,
                    "sampler": "engine" if found.engine else "copy of the trainer's network",
                    **found.summary(),
                    "by_timestep": dict(zip(found.timesteps, found.by_timestep(), strict=True)),
                }
                for found in self.mismatches
            ],
            "bound": None if self.bound is None else self.bound.key,
            "clipped_before_update": {f"{value:g}": share for value, share in self.clipped.items()},
            "diagnosis": {
                "cause": diagnosis.cause,
                "verdict": diagnosis.sentence(),
                "notes": list(diagnosis.notes),
                "mismatch": diagnosis.mismatch,
                "floor": diagnosis.copy_mismatch,
                "as_recorded": diagnosis.as_recorded,
                "trials": [trial._asdict() for trial in diagnosis.trials],
            },
            "tails": [trial._asdict() for trial in self.tails],
            "caches": [trial._asdict() for trial in self.caches],
            "settings": self.settings.values,
            "reason": self.settings.reason,
            "notes": list(self.settings.notes),
        }

    def header(self) -> list[str]:
        """Returns what a reader of the YAML should know, line by line."""
        subject = self.subject
        return [
            f"Measured with {subject['engine']}, {subject['precision']}, on {subject['model']}, "
            f"guidance {subject['guidance']:g}, {subject['samples']} samples; noise floor "
            f"{self.mismatches[0].summary()['floor']:.1e}.",
            f"{self.diagnosis.sentence()}.",
        ]


class Folder:
    """The files of one result: numbers, picture, and `calibration/NAME.yaml` for training."""

    def __init__(self, root: Path, name: str) -> None:
        if not name.isidentifier():
            raise ValueError(
                f"--name {name}: give letters, digits and underscores, for +{GROUP}=NAME"
            )
        self.root = root
        self.name = name
        self.json = root / "calibration.json"
        self.picture = root / "mismatch.png"
        self.yaml = root / GROUP / f"{name}.yaml"

    def check(self, *, overwrite: bool) -> None:
        """Raises ValueError if another result would be lost."""
        there = [str(path) for path in (self.json, self.picture, self.yaml) if path.exists()]
        if there and not overwrite:
            raise ValueError(
                f"--out {self.root} holds a result already ({', '.join(there)}): give another "
                "folder, or --overwrite"
            )

    def write(self, found: Calibration) -> None:
        """Writes numbers, picture and settings."""
        self.yaml.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(as_json(found.json()), indent=2)
        write_atomic(self.json, f"{content}\n".encode())
        draw(found, self.picture)
        write_atomic(self.yaml, found.settings.yaml(found.header()).encode())


def draw(found: Calibration, path: Path) -> None:
    """Draws the mean |difference| by timestep, with crosses for copies and dashes for other
    guidance.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    precisions = dict.fromkeys(mismatch.precision for mismatch in found.mismatches)
    colors = {name: f"C{number}" for number, name in enumerate(precisions)}
    configured = found.mismatches[0].guidance
    for mismatch in found.mismatches:
        axes.plot(
            mismatch.timesteps,
            [value if value > 0 else float("nan") for value in mismatch.by_timestep()],
            label=mismatch.name,
            color=colors[mismatch.precision],
            linestyle="-" if mismatch.guidance == configured else "--",
            marker="o" if mismatch.engine else "x",
        )
    # Other losses bound another quantity than what is drawn.
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
    """Prints verdict and choice, the tables behind them, and what to do with the settings."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, WIDTH)
    for line in (f"{found.diagnosis.sentence()}.", found.settings.reason, ""):
        console.print(line, soft_wrap=True)
    console.print(mismatch_table(found.mismatches))
    console.print(trial_table(found.diagnosis))
    if found.tails:
        console.print(tail_table(found.tails))
    if found.caches:
        console.print(cache_table(found.caches))
    lines = [
        *found.settings.notes,
        f"{folder.json}, {folder.picture}, {folder.yaml}",
        f"train with them: flowgrpo-rc train --config-dir {folder.root} +{GROUP}={folder.name} ...",
    ]
    if found.bound is not None:
        shares = [
            f"{100 * share:.1f}% with {found.bound.key}={value:g}"
            for value, share in found.clipped.items()
        ]
        beyond = f"beyond the bound before any update, in bypass mode: {', '.join(shares)}"
        lines.insert(0, beyond)
    for line in lines:
        console.print(line, soft_wrap=True)


def mismatch_table(mismatches: Sequence[Mismatch]) -> Table:
    """Makes a table of the mismatch by timestep, one column for each sampler."""
    names = ["\n".join(mismatch.name.split()) for mismatch in mismatches]
    table = _table("|log-prob of trainer - of sampler| before any update", "timestep", *names)
    columns = [mismatch.by_timestep() for mismatch in mismatches]
    for timestep, *row in zip(mismatches[0].timesteps, *columns, strict=True):
        table.add_row(str(timestep), *map(number, row))
    table.add_section()
    summaries = [mismatch.summary() for mismatch in mismatches]
    for name in summaries[0]:
        table.add_row(name, *(number(summary[name]) for summary in summaries))
    return table


def trial_table(diagnosis: Diagnosis) -> Table:
    """Makes a table of the faults that were tried, with the mismatch that each one leaves."""
    names = ("cause", "fault", "difference from the engine")
    table = _table("replayed with a fault on our side", *names)
    table.add_row("", "none", number(diagnosis.as_recorded))
    table.add_section()
    for trial in diagnosis.trials:
        style = "bold" if trial is diagnosis.explanation else ""
        table.add_row(trial.cause, trial.fault, number(trial.residual), style=style)
    return table


def tail_table(tails: Sequence[TailTrial]) -> Table:
    """Makes a table of shorter tails and what their advantages have in common with the full one."""
    names = ("evaluations", "tail_steps", "tail", "correlation of advantages")
    table = _table("samples with a shorter tail, from the same noise", *names)
    for trial in tails:
        numbers = (str(trial.evaluations), str(trial.tail_steps))
        table.add_row(*numbers, trial.tail, f"{trial.agreement:.3f}")
    return table


def cache_table(caches: Sequence[CacheTrial]) -> Table:
    """Makes a table of block caches, of what they save, and of what their samples are worth."""
    names = ("blocks saved", "every", "window", "correlation of advantages", "mismatch", "carried")
    table = _table("samples that use blocks again, from the same noise", *names)
    for trial in caches:
        words = ["yes" if value else "no" for value in (trial.window, trial.carried)]
        saved, agreement = f"{trial.saved:.0%}", f"{trial.agreement:.3f}"
        table.add_row(
            saved, str(trial.every), words[0], agreement, number(trial.mismatch), words[1]
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right")
    return table


def number(value: float) -> str:
    """Returns a number as the tables show it."""
    return "0" if value == 0 else f"{value:.1e}"

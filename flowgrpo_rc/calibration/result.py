"""The result of a calibration: tables on the terminal, a picture, JSON, and a YAML for training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowgrpo_rc.calibration.choice import Bound, Settings
from flowgrpo_rc.calibration.measure import Mismatch
from flowgrpo_rc.calibration.savings import Saving
from flowgrpo_rc.calibration.verdict import Diagnosis
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.records.metrics_file import as_json

GROUP = "calibration"
WORDS = ("cause", "fault", "tail")  # columns of words; numbers stand on the right
WIDTH = 110  # of the tables at least: a narrower one would cut its numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The measurements, and the settings that follow from them."""

    subject: Mapping[str, Any]  # what was calibrated
    # The first is the engine's, at the configured guidance and over all samples.
    mismatches: Sequence[Mismatch]
    bound: Bound | None
    clipped: dict[float, float]  # value of the bound -> share of steps outside it before any update
    diagnosis: Diagnosis
    settings: Settings
    tails: Sequence[Saving] = ()  # empty unless they were tried
    caches: Sequence[Saving] = ()  # likewise

    def json(self) -> dict[str, Any]:
        """Returns the content of calibration.json."""
        diagnosis = self.diagnosis
        return {
            "subject": self.subject,
            "mismatch": [
                {
                    "guidance": mismatch.guidance,
                    "precision": mismatch.precision,
                    "sampler": "engine" if mismatch.engine else "copy of the trainer's network",
                    **mismatch.summary(),
                    "by_timestep": dict(
                        zip(mismatch.timesteps, mismatch.by_timestep(), strict=True)
                    ),
                }
                for mismatch in self.mismatches
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
            "tails": [saving.record() for saving in self.tails],
            "caches": [saving.record() for saving in self.caches],
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
        old = [str(path) for path in (self.json, self.picture, self.yaml) if path.exists()]
        if old and not overwrite:
            raise ValueError(
                f"--out {self.root} holds a result already ({', '.join(old)}): give another "
                "folder, or --overwrite"
            )

    def write(self, calibration: Calibration) -> None:
        """Writes numbers, picture and settings."""
        content = json.dumps(as_json(calibration.json()), indent=2)
        write_atomic(self.json, f"{content}\n".encode())
        draw(calibration, self.picture)
        write_atomic(self.yaml, calibration.settings.yaml(calibration.header()).encode())


def draw(calibration: Calibration, path: Path) -> None:
    """Draws the mean |difference| by timestep, with crosses for copies and dashes for other
    guidance.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    mismatches = calibration.mismatches
    precisions = list(dict.fromkeys(mismatch.precision for mismatch in mismatches))
    for mismatch in mismatches:
        axes.plot(
            mismatch.timesteps,
            [value if value > 0 else float("nan") for value in mismatch.by_timestep()],
            label=mismatch.name,
            color=f"C{precisions.index(mismatch.precision)}",
            linestyle="-" if mismatch.guidance == mismatches[0].guidance else "--",
            marker="o" if mismatch.engine else "x",
        )
    # Other losses bound another quantity than what is drawn.
    bounds_mismatch = calibration.bound is not None and calibration.bound.on_mismatch
    for clip in calibration.clipped if bounds_mismatch else ():
        axes.axhline(clip, color="0.45", linestyle=":", linewidth=1)
        anchor = ("axes fraction", "data")
        axes.annotate(f" clip_ratio {clip:g}", (1, clip), xycoords=anchor, ha="left", va="center")
    axes.set(xlabel="timestep", ylabel="mean |log-prob of trainer - of sampler|", yscale="log")
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, edgecolor="none")
    figure.savefig(path, dpi=150)


def show(calibration: Calibration, folder: Folder) -> None:
    """Prints verdict and choice, the tables behind them, and what to do with the settings."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, WIDTH)
    settings = calibration.settings
    for line in (f"{calibration.diagnosis.sentence()}.", settings.reason, ""):
        console.print(line, soft_wrap=True)
    console.print(mismatch_table(calibration.mismatches))
    console.print(trial_table(calibration.diagnosis))
    if calibration.tails:
        console.print(saving_table("a shorter tail", calibration.tails))
    if calibration.caches:
        console.print(saving_table("blocks used again", calibration.caches))
    lines = [
        *settings.notes,
        f"{folder.json}, {folder.picture}, {folder.yaml}",
        f"train with them: flowgrpo-rc train --config-dir {folder.root} +{GROUP}={folder.name} ...",
    ]
    if calibration.bound is not None:
        key = calibration.bound.key
        shares = [
            f"{100 * share:.1f}% with {key}={value:g}"
            for value, share in calibration.clipped.items()
        ]
        beyond = f"beyond the bound before any update, in bypass mode: {', '.join(shares)}"
        lines.insert(0, beyond)
    for line in lines:
        console.print(line, soft_wrap=True)


def mismatch_table(mismatches: Sequence[Mismatch]) -> Table:
    """Makes a table of the mismatch by timestep, one column for each sampler."""
    first = mismatches[0]
    titles = ["timestep", *("\n".join(mismatch.name.split()) for mismatch in mismatches)]
    columns = [[*mismatch.by_timestep(), *mismatch.summary().values()] for mismatch in mismatches]
    names = [*map(str, first.timesteps), *first.summary()]
    rows = [(name, *map(number, row)) for name, *row in zip(names, *columns, strict=True)]
    title = "|log-prob of trainer - of sampler| before any update"
    return table(title, titles, rows, section=len(first.timesteps))


def trial_table(diagnosis: Diagnosis) -> Table:
    """Makes a table of the faults that were tried, with the mismatch that each one leaves."""
    trials = [("", "none", diagnosis.as_recorded), *diagnosis.trials]
    rows = [(cause, fault, number(residual)) for cause, fault, residual in trials]
    titles = ("cause", "fault", "difference from the engine")
    title = "replayed with a fault on our side"
    bold = next((i for i, trial in enumerate(trials) if trial is diagnosis.explanation), None)
    return table(title, titles, rows, section=1, bold=bold)


def saving_table(name: str, savings: Sequence[Saving]) -> Table:
    """Makes a table of cheaper rollouts, of what they save, and of what their samples are worth."""
    rows = []
    for saving in savings:
        cells = {key: str(value) for key, value in saving.record().items()}
        cells["saved"] = f"{saving.saved:.0%}"
        cells["agreement"] = f"{saving.agreement:.3f}"
        cells["mismatch"] = number(saving.mismatch)
        rows.append(cells)
    titles = [{"agreement": "correlation of advantages"}.get(key, key) for key in rows[0]]
    title = f"samples with {name}, from the same noise"
    return table(title, titles, [[*cells.values()] for cells in rows])


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    section: int = 0,
    bold: int | None = None,
) -> Table:
    """Makes a table; a line stands below the first `section` rows, and one row may be bold."""
    result = Table(title=title, title_justify="left")
    for name in columns:
        result.add_column(name, justify="left" if name in WORDS else "right")
    for index, row in enumerate(rows):
        result.add_row(
            *row, style="bold" if index == bold else "", end_section=index + 1 == section
        )
    return result


def number(value: float) -> str:
    """Returns a number as the tables show it."""
    return "0" if value == 0 else f"{value:.1e}"

"""`flowgrpo-rc diagnose`: say why another trainer's run collapses, from its trajectories."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import yaml
from torch import Tensor

from flowgrpo_rc import diagnosis
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.diagnosis.checks import examine
from flowgrpo_rc.diagnosis.dump import Dump, read_dump
from flowgrpo_rc.diagnosis.formulas import by_step, declared
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.page import render

REMEDIES = Path(diagnosis.__file__).with_name("remedies.yaml")


def main(arguments: argparse.Namespace) -> int:
    """Prints the causes and writes a page; returns 1 if there is a cause."""
    dump = read_dump(Path(arguments.dump))
    samples, steps = dump.rollout.shape
    told = [f"{name} {dump.settings[name]}" for name in ("trainer", "sde_type", "noise_level")]
    subject = f"{samples} samples of {steps} steps; {', '.join(told)}"
    causes = [(*found, remedy(found[0], dump.settings["trainer"])) for found in examine(dump)]
    outcome = "Most probable cause: " + causes[0][0] if causes else "No fault that numbers show"
    unknown = {"means of the steps": dump.means, "old_log_probs": dump.old, "group": dump.group}
    unknown |= {"new_log_probs": dump.new, "advantages": dump.advantages}
    lacking = ", ".join(name for name, found in unknown.items() if found is None)
    note = f"Cannot tell what would show in: {lacking}." if lacking else ""
    print(f"{outcome} ({subject})")
    for number, (cause, evidence, mended) in enumerate(causes, 1):
        print(f"{number}. {cause}: {evidence}\n   remedy: {mended}")
    page = render(
        "diagnose.html",
        title=f"Diagnosis of {Path(arguments.dump).name}",
        outcome=outcome,
        subject=subject,
        causes=causes,
        note=note,
        charts=charts(dump),
    )
    write_atomic(Path(arguments.out), page.encode())
    print(note, arguments.out, sep="\n" if note else "")
    return EXIT_FAILED if causes else EXIT_OK


def remedy(cause: str, trainer: str) -> str:
    """Returns what mends a cause in the keys of a trainer, or of all if it is not known."""
    table = yaml.safe_load(REMEDIES.read_text(encoding="utf-8"))
    known = dict(zip(table["trainers"], table[cause], strict=True))
    return known.get(trainer) or "; ".join(f"{name}: {keys}" for name, keys in known.items())


def charts(dump: Dump) -> list[Chart]:
    """Draws log-probs, and how far the two sides are apart, by step of the schedule."""
    sides = {"rollout": dump.rollout, "by the settings": declared(dump)[0].values(dump)[0]}
    apart = {}
    if dump.old is not None:
        sides["training graph"] = dump.old
        apart["|training graph - rollout|"] = (dump.old - dump.rollout).abs()
    clip = [dump.settings["clip_ratio"]] if "clip_ratio" in dump.settings else []
    title, note = "Mismatch before any update", "the clip" if clip else ""
    return [
        Chart(title="Log-prob", series=lines(dump, sides)),
        Chart(
            title=title,
            note=note,
            series=lines(dump, apart),
            log_y=True,
            thresholds=clip,
            word="mismatch",
        ),
    ]


def lines(dump: Dump, values: dict[str, Tensor]) -> list[Series]:
    """Draws the means of the samples."""
    means = {name: enumerate(by_step(dump, found)[0].tolist()) for name, found in values.items()}
    return [
        Series(name=name, points=[(x, y) for x, y in points if math.isfinite(y)])
        for name, points in means.items()
    ]

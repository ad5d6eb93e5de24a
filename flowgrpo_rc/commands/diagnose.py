"""`flowgrpo-rc diagnose`: say why another trainer's run collapses, from its trajectories."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from torch import Tensor

from flowgrpo_rc import diagnosis
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.diagnosis.checks import Examination, examine
from flowgrpo_rc.diagnosis.dump import Dump, read_dump
from flowgrpo_rc.diagnosis.formulas import by_step
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.report.charts import Chart, Points, Series
from flowgrpo_rc.report.page import render

REMEDIES = Path(diagnosis.__file__).with_name("remedies.yaml")


def main(arguments: argparse.Namespace) -> int:
    """Prints the causes and writes a page; returns 1 if there is a cause."""
    dump = read_dump(Path(arguments.dump))
    found = examine(dump)
    causes = [(cause, evidence, remedy(cause, dump.trainer)) for cause, evidence in found.findings]
    told = {
        name: dump.settings[name]
        for name in ("sde_type", "noise_level", "clip_ratio")
        if name in dump.settings
    }
    subject = (
        f"{len(dump.start) // dump.steps} samples of {dump.steps} steps, trainer {dump.trainer}, "
        + ", ".join(f"{name} {value}" for name, value in told.items())
    )
    outcome = (
        f"Most probable cause: {causes[0][0]}" if causes else "Nothing is wrong that numbers show"
    )
    print(f"{outcome} ({subject})")
    for number, (cause, evidence, mended) in enumerate(causes, 1):
        print(f"{number}. {cause}: {evidence}\n   remedy: {mended}")
    for note in found.notes:
        print(f"note: {note}")
    title = f"Diagnosis of {Path(arguments.dump).name}"
    content = {"subject": subject, "causes": causes, "notes": found.notes}
    page = render(
        "diagnose.html", title=title, outcome=outcome, charts=charts(dump, found), **content
    )
    write_atomic(Path(arguments.out), page.encode())
    print(arguments.out)
    return EXIT_FAILED if causes else EXIT_OK


def remedy(cause: str, trainer: str) -> str:
    """Returns what mends a cause, in a trainer's keys; in those of all if it is not known."""
    keys = yaml.safe_load(REMEDIES.read_text(encoding="utf-8"))[cause]
    return keys.get(trainer) or "; ".join(f"{name}: {text}" for name, text in keys.items())


def charts(dump: Dump, found: Examination) -> list[Chart]:
    """Draws the log-probs and their differences by step of the schedule."""

    def line(name: str, values: Tensor) -> Series:
        means = by_step(dump, values)[0].tolist()
        points: Points = [(step, mean) for step, mean in enumerate(means) if mean == mean]
        return Series(name=name, points=points)

    sides = {"rollout": dump.tables["rollout_log_probs"], "by the settings": found.expected}
    sides |= {
        "training graph": old for old in [dump.tables.get("old_log_probs")] if old is not None
    }
    apart = [] if found.difference is None else [line("mean |difference|", found.difference.abs())]
    clip = dump.settings.get("clip_ratio")
    title = "Training graph less rollout, before any update"
    return [
        Chart(title="Mean log-prob", series=[line(*side) for side in sides.items()]),
        Chart(
            title=title,
            series=apart,
            note="and the clip",
            log_y=True,
            thresholds=[clip] if clip else [],
        ),
    ]

"""`flowgrpo-rc diagnose`: say why another trainer's run collapses, from its trajectories."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from flowgrpo_rc import diagnosis
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.config.compose import unchecked_config
from flowgrpo_rc.diagnosis.checks import examine
from flowgrpo_rc.diagnosis.dump import TABLES, Dump, read_dump
from flowgrpo_rc.diagnosis.formulas import declared
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.page import render

REMEDIES = Path(diagnosis.__file__).with_name("remedies.yaml")


def main(arguments: argparse.Namespace) -> int:
    """Prints the causes and writes a page; returns 1 if there is a cause."""
    dump, out, evaluate = read_dump(Path(arguments.dump)), Path(arguments.out), None
    if arguments.overrides is not None:
        from flowgrpo_rc.diagnosis.replay import check_model  # needs the libraries of models

        config = unchecked_config(arguments.composition.config)
        evaluate = partial(check_model, config=config)
    trainer = str(dump.settings["trainer"])
    causes = [(*found, remedy(found[0], trainer)) for found in examine(dump, evaluate)]
    optional = ("means", "old", "new", "advantages", "group")
    lacking = [TABLES.get(name, name) for name in optional if getattr(dump, name) is None]
    outcome = f"Most probable cause: {causes[0][0]}" if causes else "No fault found"
    samples, without = len(dump.rollout), ", ".join(lacking) or "-"
    subject = f"{samples} samples, trainer {trainer}, lacking: {without}"
    told: dict[str, Any] = {"outcome": outcome, "subject": subject, "causes": causes}
    title = f"Diagnosis of {arguments.dump}"
    page = render("diagnose.html", title=title, charts=charts(dump), **told)
    write_atomic(out, page.encode())
    numbered = [f"{i}. {': '.join(one[:2])}\n   {one[2]}" for i, one in enumerate(causes, 1)]
    print(outcome, subject, *numbered, out, sep="\n")
    return EXIT_FAILED if causes else EXIT_OK


def remedy(cause: str, trainer: str) -> str:
    """Returns what mends a cause in the keys of a trainer, or of all if it is not known."""
    table: dict[str, list[str]] = yaml.safe_load(REMEDIES.read_text(encoding="utf-8"))
    row = next(row for causes, row in table.items() if cause in causes.split(", "))
    known = dict(zip(table["trainers"], row, strict=True))
    return known.get(trainer) or "; ".join(f"{name}: {keys}" for name, keys in known.items())


def charts(dump: Dump) -> list[Chart]:
    """Draws log-probs, and how far the two sides are apart, by step of the schedule."""
    sides = {"rollout": dump.rollout, "by the settings": declared(dump)[0].values(dump)[0]}
    if dump.old is not None:
        sides |= {"training graph": dump.old, "difference": (dump.old - dump.rollout).abs()}
    lines = []
    for name, values in sides.items():
        means = enumerate(dump.by_step(values)[0].tolist())
        lines.append(Series(name=name, points=[(x, y) for x, y in means if y == y]))
    clip = [dump.settings["clip_ratio"]] if "clip_ratio" in dump.settings else []
    apart = Chart(title="Mismatch", word="mismatch", series=lines[3:], log_y=True, thresholds=clip)
    return [Chart(title="Log-prob", series=lines[:3]), apart]

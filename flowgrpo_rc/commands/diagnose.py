"""`flowgrpo-rc diagnose`: say why another trainer's run collapses, from its trajectories."""

import argparse
from functools import partial
from pathlib import Path

from flowgrpo_rc.calibration.causes import keys_of
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.config.compose import to_config
from flowgrpo_rc.diagnosis.checks import examine
from flowgrpo_rc.diagnosis.dump import TABLES, Dump, read_dump
from flowgrpo_rc.diagnosis.formulas import declared
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.report.charts import Chart, Series
from flowgrpo_rc.report.page import render


def main(arguments: argparse.Namespace) -> int:
    """Prints the causes and writes a page; returns 1 if there is a cause."""
    dump = read_dump(Path(arguments.dump))
    out = Path(arguments.out)
    evaluate = None
    if arguments.overrides is not None:
        from flowgrpo_rc.diagnosis.replay import check_model  # needs the libraries of models

        config = to_config(arguments.composition.config)
        evaluate = partial(check_model, config=config)
    trainer = str(dump.settings["trainer"])
    symptoms = examine(dump, evaluate)
    causes = [(cause, evidence, keys_of(cause, trainer)) for cause, evidence in symptoms]
    optional = ("means", "old", "new", "advantages", "group")
    lacking = [TABLES.get(name, name) for name in optional if getattr(dump, name) is None]
    outcome = f"Most probable cause: {causes[0][0]}" if causes else "No fault found"
    without = ", ".join(lacking) or "-"
    subject = f"{len(dump.rollout)} samples, trainer {trainer}, lacking: {without}"
    page = render(
        "diagnose.html",
        title=f"Diagnosis of {arguments.dump}",
        charts=charts(dump),
        outcome=outcome,
        subject=subject,
        causes=causes,
    )
    write_atomic(out, page.encode())
    numbered = [f"{i}. {row[0]}: {row[1]}\n   {row[2]}" for i, row in enumerate(causes, 1)]
    print(outcome, subject, *numbered, out, sep="\n")
    return EXIT_FAILED if causes else EXIT_OK


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

"""`flowgrpo-rc diagnose`: say why another trainer's run collapses, from its trajectories."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

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
    dump, out = read_dump(Path(arguments.dump)), Path(arguments.out)
    samples, steps = dump.rollout.shape
    told = [f"{name} {dump.settings[name]}" for name in ("trainer", "sde_type", "noise_level")]
    causes = [(*found, remedy(found[0], dump.settings["trainer"])) for found in examine(dump)]
    optional = ("means", "old", "new", "advantages", "group")
    lacking = ", ".join(name for name in optional if getattr(dump, name) is None)
    content: dict[str, Any] = {
        "title": f"Diagnosis of {Path(arguments.dump).name}",
        "outcome": f"Most probable cause: {causes[0][0]}" if causes else "No fault in the numbers",
        "subject": f"{samples} samples of {steps} steps; {', '.join(told)}",
        "causes": causes,
        "note": f"Cannot tell what these would show: {lacking}." if lacking else "",
    }
    write_atomic(out, render("diagnose.html", charts=charts(dump), **content).encode())
    numbered = [f"{i}. {': '.join(one[:2])}\n   {one[2]}" for i, one in enumerate(causes, 1)]
    print(content["outcome"], content["subject"], *numbered, content["note"], out, sep="\n")
    return EXIT_FAILED if causes else EXIT_OK


def remedy(cause: str, trainer: str) -> str:
    """Returns what mends a cause in the keys of a trainer, or of all if it is not known."""
    table: dict[str, Sequence[str]] = yaml.safe_load(REMEDIES.read_text(encoding="utf-8"))
    known = dict(zip(table["trainers"], table[cause], strict=True))
    return known.get(trainer) or "; ".join(f"{name}: {keys}" for name, keys in known.items())


def charts(dump: Dump) -> list[Chart]:
    """Draws log-probs, and how far the two sides are apart, by step of the schedule."""
    sides = {"rollout": dump.rollout, "by the settings": declared(dump)[0].values(dump)[0]}
    if dump.old is not None:
        sides |= {"training graph": dump.old, "difference": (dump.old - dump.rollout).abs()}
    lines = []
    for name, values in sides.items():
        means = enumerate(by_step(dump, values)[0].tolist())
        lines.append(Series(name=name, points=[(x, y) for x, y in means if y == y]))
    clip = [dump.settings["clip_ratio"]] if "clip_ratio" in dump.settings else []
    apart = Chart(title="Mismatch", word="mismatch", series=lines[3:], log_y=True, thresholds=clip)
    return [Chart(title="Log-prob", series=lines[:3]), apart]

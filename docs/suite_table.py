"""Writes the table of a reward that is gamed into docs/reports.md: `make reference`.

Its numbers are those of examples/studies/results/suites/saturation.jsonl: rows of the metrics.jsonl
and health.jsonl of the run whose command stands on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "reports.md"
RESULTS = DOCS.parent / "examples" / "studies" / "results" / "suites" / "saturation.jsonl"
START = "<!-- Written by `make reference`: gamed. -->\n"
END = "<!-- end of what is written -->\n"
CHANGE = "suite/words/change"
STEPS = 5  # of training that a row of the table sums up


def page() -> str:
    """Returns docs/reports.md with the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, found, rest = text.partition(START)
    assert found, f"{PAGE.name} has no {START!r}"
    return f"{before}{START}\n{''.join(table())}\n{END}{rest.partition(END)[2]}"


def rows() -> list[dict[str, Any]]:
    """Returns the rows of the run, by step."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table() -> Iterator[str]:
    """Yields the lines of the table: a row for each evaluation."""
    yield "| step | reward, mean of 5 steps | words read | change | 95% interval | |\n"
    yield "|---|---|---|---|---|---|\n"
    found = rows()
    for row in found:
        if CHANGE not in row:
            continue
        step = row["step"]
        rewards = [
            r["reward/mean"] for r in found if step - STEPS < r["step"] <= step and r["step"]
        ]
        reward = f"{fmean(rewards):.3f}" if rewards else ""
        low, high = (f"{row[f'{CHANGE}_{end}']:+.3f}" for end in ("low", "high"))
        told = "the warning" if "message" in row else ""
        yield (
            f"| {step} | {reward} | {row['suite/words/reward']:.3f} | {row[CHANGE]:+.3f} "
            f"| {low} to {high} | {told} |\n"
        )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

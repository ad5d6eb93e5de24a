"""Writes the tables about workers in docs/scaling_out.md: `make reference`.

One is computed for an example. The other compares the formula with what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flowgrpo_rc.planning.workers import Work

PAGE = Path(__file__).parent / "scaling_out.md"
EXAMPLE = Work(chunks=64, chunk_s=5.0, reward_s=2.0, training_s=45.0)
# Medians of the bundled job without workers; seconds of its steps with one, by staleness.
MEASURED = Work(chunks=4, chunk_s=0.326, reward_s=0.141, training_s=1.465)
STEP_S = 2.96
STEP_S_WITH_WORKER = {0: 3.01, 1: 1.85}
END = "<!-- end of what is written -->\n"


def page() -> str:
    """Returns docs/scaling_out.md with the tables that follow from the seconds above."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("simulated", simulated()), ("compared", compared())):
        text = _with_table(text, f"<!-- Written by `make reference`: {name}. -->\n", rows)
    return text


def simulated() -> Iterator[str]:
    """Yields the rows of the example."""
    cells = ("a step", "times as fast", "workers busy")
    strict, ahead = (
        " | ".join(f"{cell}, {mode}" for cell in cells) for mode in ("strict", "k = 1")
    )
    yield f"| workers | {strict} | {ahead} |\n|---|---|---|---|---|---|---|\n"
    for number in (1, 2, 4, 8, 16, 32, 64):
        yield f"| {number} | {_cells(number, 0)} | {_cells(number, 1)} |\n"


def compared() -> Iterator[str]:
    """Yields the rows of the bundled job."""
    yield "| run | a step, predicted | measured | measured / predicted | times as fast, predicted "
    yield "| measured |\n|---|---|---|---|---|---|\n"
    yield f"| `rollout.workers=0` | | {STEP_S:.2f} s | | | |\n"
    for staleness, seconds in STEP_S_WITH_WORKER.items():
        predicted = MEASURED.step_s(1, staleness)
        yield (
            f"| `rollout.workers=1 rollout.staleness={staleness}` | {predicted:.2f} s "
            f"| {seconds:.2f} s | {seconds / predicted:.2f} | {STEP_S / predicted:.2f} "
            f"| {STEP_S / seconds:.2f} |\n"
        )


def _cells(workers: int, staleness: int) -> str:
    step_s = EXAMPLE.step_s(workers, staleness)
    faster = EXAMPLE.step_s(1, 0) / step_s
    return f"{step_s:.0f} s | {faster:.1f} | {EXAMPLE.workers_busy(workers, staleness):.0%}"


def _with_table(text: str, start: str, rows: Iterable[str]) -> str:
    before, found, rest = text.partition(start)
    assert found, f"{PAGE.name} has no {start!r}"
    _, _, after = rest.partition(END)
    return f"{before}{start}\n{''.join(rows)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

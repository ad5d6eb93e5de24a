"""The tables about workers follow from the seconds that they name."""

from __future__ import annotations

import worker_tables
from worker_tables import EXAMPLE, STEP_S_WITH_WORKER


def test_the_tables_are_those_of_the_formula() -> None:
    committed = worker_tables.PAGE.read_text(encoding="utf-8")
    assert committed == worker_tables.page(), "docs/scaling_out.md is old: run `make reference`"


def test_what_the_page_concludes() -> None:
    text = worker_tables.PAGE.read_text(encoding="utf-8")
    assert f"{EXAMPLE.chunks} chunks of {EXAMPLE.chunk_s:g} s in a step" in text
    assert f"{EXAMPLE.reward_s:g} s of waiting for the last rewards" in text
    assert f"{EXAMPLE.training_s:g} s of\ntraining" in text
    assert "With a staleness of 1 eight workers hide sampling" in text
    assert EXAMPLE.enough_workers(1) == 8
    assert EXAMPLE.trainer_busy(8, 1) == 1.0
    measured = worker_tables.MEASURED
    longer = [
        seconds / measured.step_s(1, staleness) - 1
        for staleness, seconds in STEP_S_WITH_WORKER.items()
    ]
    strict, ahead = (f"{share:.0%}" for share in longer)
    assert f"The strict step is {strict} longer than predicted" in text
    assert f"With a staleness of 1 it is {ahead} longer" in text
    for seconds in (measured.chunk_s, measured.reward_s, measured.training_s):
        assert f"{seconds} s" in text

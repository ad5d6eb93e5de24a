"""The tables of docs/memory.md follow from the shipped settings and from the code that plans."""

from __future__ import annotations

import json

import memory_tables
import pytest
from memory_tables import CARD_GIB, GIB, cards_of, experiment, jobs

from flowgrpo_rc.planning.activations import phase_bytes
from flowgrpo_rc.planning.fit import HEADROOM
from flowgrpo_rc.planning.operations import operations

STORE = json.loads(memory_tables.STORE.read_text(encoding="utf-8"))
RENEW = "docs/memory.json is old: run `make reference`"


def test_the_page_shows_what_is_kept() -> None:
    committed = memory_tables.PAGE.read_text(encoding="utf-8")
    assert committed == memory_tables.page(STORE), "docs/memory.md is old: run `make reference`"


def test_every_shipped_experiment_has_its_plan() -> None:
    kept = {name: row["digest"] for name, row in STORE["experiments"].items()}
    assert kept == {name: experiment(name).digest for name in memory_tables.EXPERIMENTS}, RENEW


def test_the_table_of_cards_has_every_job() -> None:
    kept = {key: row["digest"] for key, row in STORE["cards"].items()}
    assert kept == {key: job.digest for key, job in jobs()}, RENEW


@pytest.mark.slow
def test_a_new_plan_agrees() -> None:
    """But for activations of update and evaluation, which take minutes to measure."""
    name = "sana_600m_ocr_1xh100"  # the smallest; the others are as old by their digests
    job = experiment(name)
    kept = STORE["needs"][job.needs_digest]
    run = job.planned
    for phase in ("rollout", "decoding"):
        assert phase_bytes(phase, run.spec, run.model, 1) == kept[phase]["one"]
    assert STORE["work"][job.work_digest] == operations(run)
    assert memory_tables.plan_row(name, STORE) == STORE["experiments"][name]


@pytest.mark.parametrize("name", memory_tables.EXPERIMENTS)
def test_shipped_settings_fit_their_cards(name: str) -> None:
    row = STORE["experiments"][name]
    card = CARD_GIB[cards_of(name)[1]]
    assert row["peak"] <= (1 - HEADROOM) * card * GIB
    assert row["proposed"] == row["shipped"]

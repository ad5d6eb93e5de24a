"""The best evaluation of a run, from its rows."""

from __future__ import annotations

import math

import pytest

from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.config import TrainerConfig


@pytest.mark.parametrize(
    ("rewards", "step", "worse"),
    [
        ([], None, 0),
        ([None], None, 1),
        ([0.5], 0, 0),
        ([0.5, 0.5, 0.4], 0, 2),  # the first of equals
        ([0.5, 0.7, 0.6, math.nan, None], 1, 3),
        ([-2.0, -1.0, -3.0, -0.5], 3, 0),
    ],
)
def test_best_and_how_many_were_no_better(
    rewards: list[float | None], step: int | None, worse: int
) -> None:
    rows = [{"step": 2 * i, "val/reward": reward} for i, reward in enumerate(rewards)]
    rows += [{"step": 99, "reward/mean": 9.0}]
    best = BestEvaluation(rows)
    assert (best.step, best.worse) == (None if step is None else 2 * step, worse)
    assert best.over(3) == (worse >= 3)
    assert not best.over(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "trainer.patience=0: give at least 1, or null"),
        ({"patience": 2, "test_freq": 0}, "no effect with trainer.test_freq=0"),
        ({"sample_freq": -1}, "trainer.sample_freq=-1: give at least 0"),
        ({"export_freq": -1}, "trainer.export_freq=-1: give at least 0"),
        ({"push_to_hub": "lora"}, "trainer.push_to_hub='lora': write user/name"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**settings).validate()  # type: ignore[arg-type]

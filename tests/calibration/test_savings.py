"""Which tail and which block cache are recommended, and what that writes."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo_rc.calibration.choice import Settings
from flowgrpo_rc.calibration.savings import (
    CacheTrial,
    TailTrial,
    caches_to_try,
    cheapest,
    correlation,
    with_cache,
    with_tail,
)
from flowgrpo_rc.rollout.config import AlgoConfig, RolloutConfig


def trial(tail_steps: int, agreement: float, tail: str = "euler") -> TailTrial:
    return TailTrial(
        tail=tail, tail_steps=tail_steps, evaluations=5 + tail_steps, agreement=agreement
    )


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(1, 0.9), trial(2, 0.96), trial(3, 0.99)], 1),
        ([trial(1, 0.94), trial(1, 0.951, "ab2"), trial(2, 0.99)], 1),
        ([trial(2, 0.96), trial(2, 0.97, "ab2")], 1),
        ([trial(1, math.nan), trial(2, 0.95)], 1),
        ([trial(1, 0.5), trial(2, math.nan)], None),
    ],
)
def test_the_fewest_evaluations_that_agree_and_then_the_best(trials, chosen):
    assert cheapest(trials) == (None if chosen is None else trials[chosen])


def test_the_chosen_tail_is_written():
    before = Settings(values={"a.b": 1}, reason="why", notes=["before"])
    found = with_tail(before, [trial(2, 0.97, "ab2")])
    assert found.values == {"a.b": 1, "rollout.algo.tail": "ab2", "rollout.algo.tail_steps": 2}
    assert found.notes[0] == "before"
    assert "7 evaluations" in found.notes[1]
    none_agrees = with_tail(before, [trial(2, 0.5)])
    assert (none_agrees.values, len(none_agrees.notes)) == ({"a.b": 1}, 2)


def test_a_correlation_is_pearsons():
    left = torch.tensor([1.0, 2.0, 4.0, -1.0])
    assert correlation(left, 3 * left + 1) == pytest.approx(1)
    assert correlation(left, -left) == pytest.approx(-1)
    assert math.isnan(correlation(left, torch.zeros(4)))


def cached(saved: float, agreement: float, *, carried: bool = True) -> CacheTrial:
    return CacheTrial(
        every=2, window=True, saved=saved, agreement=agreement, mismatch=1e-3, carried=carried
    )


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([cached(0.4, 0.94), cached(0.3, 0.96), cached(0.2, 0.99)], 1),
        ([cached(0.4, 0.99, carried=False), cached(0.2, 0.95)], 1),
        ([cached(0.3, 0.96), cached(0.3, 0.97)], 1),
        ([cached(0.4, math.nan), cached(0.3, 0.5)], None),
    ],
)
def test_what_saves_most_of_those_that_agree_and_are_carried(trials, chosen):
    assert cheapest(trials) == (None if chosen is None else trials[chosen])
    found = with_cache(Settings(values={"a.b": 1}, reason="why", notes=["before"]), trials)
    cache = {} if chosen is None else {"rollout.cache.every": 2, "rollout.cache.window": True}
    assert found.values == {"a.b": 1} | cache
    assert len(found.notes) == 2


def test_no_two_settings_skip_the_same_steps() -> None:
    algo = AlgoConfig(sde_window_size=2, sde_window_range=[1, 4], tail_steps=1)
    tried = caches_to_try(RolloutConfig(algo=algo))  # five evaluations
    found = [(row.cache.every, row.cache.window, row.cached_steps()) for row in tried]
    most = [(3, True, (1, 2, 4)), (4, True, (1, 2, 3))]
    assert found == [*most, (2, True, (1, 3)), (3, False, (4,))]

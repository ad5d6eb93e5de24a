"""Which tail and which block cache are recommended, and what that writes."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo_rc.calibration.choice import Settings
from flowgrpo_rc.calibration.savings import (
    Saving,
    caches_to_try,
    cheapest,
    correlation,
    with_cheapest,
)
from flowgrpo_rc.rollout.config import AlgoConfig, RolloutConfig


def saving(saved: float, agreement: float, *, carried: bool = True) -> Saving:
    return Saving({"rollout.cache.every": 2}, saved, agreement, 1e-3, carried)


@pytest.mark.parametrize(
    ("savings", "chosen"),
    [
        ([saving(0.4, 0.94), saving(0.3, 0.96), saving(0.2, 0.99)], 1),
        ([saving(0.4, 0.99, carried=False), saving(0.2, 0.95)], 1),
        ([saving(0.3, 0.96), saving(0.3, 0.97)], 1),
        ([saving(0.4, math.nan), saving(0.3, 0.95)], 1),
        ([saving(0.4, math.nan), saving(0.3, 0.5)], None),
    ],
)
def test_what_saves_most_of_those_that_agree_and_are_carried(savings, chosen) -> None:
    assert cheapest(savings) == (None if chosen is None else savings[chosen])
    before = Settings(values={"a.b": 1}, reason="why", notes=["before"])
    settings = with_cheapest(before, savings)
    assert settings.values == {"a.b": 1} | ({} if chosen is None else savings[chosen].settings)
    assert settings.notes[0] == "before"
    assert "rollout.cache.every" in settings.notes[1]


def test_a_correlation_is_pearsons():
    left = torch.tensor([1.0, 2.0, 4.0, -1.0])
    assert correlation(left, 3 * left + 1) == pytest.approx(1)
    assert correlation(left, -left) == pytest.approx(-1)
    assert math.isnan(correlation(left, torch.zeros(4)))


def test_no_two_settings_skip_the_same_steps() -> None:
    algo = AlgoConfig(sde_window_size=2, sde_window_range=[1, 4], tail_steps=1)
    tried = caches_to_try(RolloutConfig(algo=algo))  # five evaluations
    found = [(row.cache.every, row.cache.window, row.cached_steps()) for row in tried]
    most = [(3, True, (1, 2, 4)), (4, True, (1, 2, 3))]
    assert found == [*most, (2, True, (1, 3)), (3, False, (4,))]

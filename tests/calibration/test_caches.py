"""Which block cache is recommended, and what that writes."""

from __future__ import annotations

import math

import pytest

from flowgrpo_rc.calibration.caches import CacheTrial, cheapest, settings_to_try, with_cache
from flowgrpo_rc.calibration.choice import Settings
from flowgrpo_rc.rollout.config import AlgoConfig, RolloutConfig


def trial(saved: float, agreement: float, *, carried: bool = True) -> CacheTrial:
    return CacheTrial(
        every=2, window=True, saved=saved, agreement=agreement, mismatch=1e-3, carried=carried
    )


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(0.4, 0.94), trial(0.3, 0.96), trial(0.2, 0.99)], 1),
        ([trial(0.4, 0.99, carried=False), trial(0.2, 0.95)], 1),
        ([trial(0.3, 0.96), trial(0.3, 0.97)], 1),
        ([trial(0.4, math.nan), trial(0.3, 0.5)], None),
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
    tried = settings_to_try(RolloutConfig(algo=algo))  # five evaluations
    found = [(one.cache.every, one.cache.window, one.cached_steps()) for one in tried]
    most = [(3, True, (1, 2, 4)), (4, True, (1, 2, 3))]
    assert found == [*most, (2, True, (1, 3)), (3, False, (4,))]

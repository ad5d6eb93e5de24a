"""A reward that rises while a guard falls: when that is said, and that it is said once."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.monitoring.health_rules import Setup

CORRECTION = RolloutCorrectionConfig()
SETUP = Setup.of(CORRECTION, CORRECTION.rules(), text=False, fresh=True, unquantized=None)
FALLEN = {"suite/ocr/change": -0.3, "suite/ocr/change_low": -0.4, "suite/ocr/change_high": -0.2}
NOISY = FALLEN | {"suite/ocr/change_high": 0.01}
RISING = [0.10, 0.13, 0.11, 0.14, 0.12, 0.21, 0.24, 0.22, 0.25, 0.23]


def warnings(rewards: Sequence[float | None], last: dict[str, float | None]) -> list[str]:
    """Returns what is said when the metrics `last` come with the last reward."""
    monitor = HealthMonitor(SETUP)
    said = []
    for step, reward in enumerate(rewards, start=1):
        row = {"reward/mean": reward}
        said += monitor.update(step, row | last if step == len(rewards) else row)
    return said


def test_both_are_named() -> None:
    assert len(warnings([0.1, 0.11, 0.3, 0.31], FALLEN)) == 1  # a run of four steps
    (said,) = warnings(RISING, FALLEN)
    assert said.startswith(
        "suite/ocr/change is -0.3 (95% interval -0.4 to -0.2), while reward/mean"
    )
    assert "has risen by 0.11:" in said
    assert said.endswith(".")


@pytest.mark.parametrize(
    ("rewards", "last"),
    [
        (RISING, NOISY),
        (RISING, {}),
        (RISING, FALLEN | {"suite/ocr/change_high": None}),
        (RISING[::-1], FALLEN),
        ([0.1, 0.9, 0.2, 0.8, 0.3, 0.3, 0.9, 0.2, 0.9, 0.3], FALLEN),
        (RISING[:3], FALLEN),
        ([None, float("nan")] * 5, FALLEN),
    ],
    ids=["within", "no_guard", "no_end", "reward_falls", "reward_wavers", "too_early", "no_reward"],
)
def test_what_is_no_sign_of_gaming(
    rewards: Sequence[float | None], last: dict[str, float | None]
) -> None:
    assert warnings(rewards, last) == []


def test_it_is_said_once_for_each_guard_also_by_a_run_that_goes_on() -> None:
    other = {name.replace("ocr", "looks"): value for name, value in FALLEN.items()}
    monitor = HealthMonitor(SETUP)
    for step, reward in enumerate(RISING, start=1):
        monitor.update(step, {"reward/mean": reward})
    assert len(monitor.update(11, {"reward/mean": 0.24} | FALLEN)) == 1
    resumed = HealthMonitor(SETUP)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert resumed.update(12, {"reward/mean": 0.24} | FALLEN) == []
    (said,) = resumed.update(13, {"reward/mean": 0.24} | FALLEN | other)
    assert said.startswith("suite/looks/change")

"""When a step counts as slow, and what the user is told."""

from __future__ import annotations

import pytest

from flowgrpo_rc.records.speed import SPEED, SpeedWatch

USUAL = {"rollout": 1.0, "reward_wait": 0.5, "update": 2.0}


def row(speed: float, **seconds: float) -> dict[str, float]:
    phases = USUAL | seconds
    times = {f"timing_s/{name}": value for name, value in phases.items()}
    return {SPEED: speed, "timing_s/step": sum(phases.values()), **times}


def test_a_step_below_a_third_of_the_median_is_told_once_until_it_recovers() -> None:
    watch = SpeedWatch(1)
    # The medians before the last four are 25.5, 24, 15.5 and 20.
    speeds = [5.0, 30.0, 24.0, 27.0, 7.0, 6.0, 20.0, 5.0]
    told = [step for step, speed in enumerate(speeds, 1) if watch.notice(step, row(speed))]
    assert told == [5, 8]


def test_too_few_steps_and_evaluations_are_not_judged() -> None:
    watch = SpeedWatch(1)
    assert [watch.notice(step, row(speed)) for step, speed in enumerate([30, 30, 1])] == [None] * 3
    assert watch.notice(3, {"val/reward": 1.0, "timing_s/evaluation": 50.0}) is None


@pytest.mark.parametrize(
    ("threads", "seconds", "words"),
    [
        (2, {"update": 90.0}, ["update (90.0 s, before 2.0 s)", "OMP_NUM_THREADS=1", "Ctrl-C"]),
        (1, {"rollout": 40.0}, ["rollout (40.0 s, before 1.0 s)", "program uses the cores"]),
        (None, {"update": 90.0}, ["another program uses the GPU"]),
        (2, {"reward_wait": 9.0}, ["reward_wait (9.0 s, before 0.5 s)", "Look after the reward"]),
    ],
)
def test_the_line_names_the_phase_and_what_to_do(
    threads: int | None, seconds: dict[str, float], words: list[str]
) -> None:
    watch = SpeedWatch(threads)
    for step in range(1, 5):
        assert watch.notice(step, row(251.0)) is None
    told = watch.notice(5, row(0.068, **seconds))
    assert told is not None
    assert told.startswith(
        "slow: step 5 made 0.068 samples/s, less than a third of the median of this run, 250. Most"
    )
    assert all(word in told for word in words)

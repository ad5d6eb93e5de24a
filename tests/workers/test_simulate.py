"""The simulated run against cases worked out by hand, and against bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flowgrpo_rc.workers.simulate import Pace, Work, enough_workers, simulate

# 8 chunks of 3 seconds, 2 seconds of rewards, 10 seconds of training.
WORK = Work(chunks=8, num_processes=1, chunk_s=3.0, reward_s=2.0, training_s=10.0)


def step_s(work: Work, num_workers: int, staleness: int = 0) -> float:
    return simulate(work, num_workers=num_workers, staleness=staleness).step_s


def test_one_strict_worker_takes_the_sum() -> None:
    expected = Pace(step_s=24 + 2 + 10, workers_busy=24 / 36, trainer_busy=10 / 36)
    assert simulate(WORK, num_workers=1, staleness=0) == expected


@pytest.mark.parametrize(("num_workers", "rounds"), [(2, 4), (3, 3), (4, 2), (5, 2), (8, 1)])
def test_strict_workers_sample_in_rounds(num_workers: int, rounds: int) -> None:
    pace = simulate(WORK, num_workers=num_workers, staleness=0)
    seconds = 3 * rounds + 2 + 10
    assert pace == Pace(
        step_s=seconds, workers_busy=24 / (num_workers * seconds), trainer_busy=10 / seconds
    )


def test_an_odd_chunk_takes_a_round_of_its_own() -> None:
    odd = replace(WORK, chunks=7)
    assert step_s(odd, 2) == 4 * 3 + 2 + 10
    # Unless the next step has chunks to share it with: 3.5 rounds of 3 seconds.
    odd = replace(odd, training_s=4.0)
    assert simulate(odd, num_workers=2, staleness=1) == Pace(
        step_s=10.5, workers_busy=1.0, trainer_busy=4 / 10.5
    )


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_more_workers_than_chunks_change_nothing(staleness: int) -> None:
    assert step_s(WORK, 9, staleness) == step_s(WORK, 8, staleness)


def test_staleness_hides_sampling_behind_training() -> None:
    assert simulate(WORK, num_workers=3, staleness=1) == Pace(
        step_s=10.5, workers_busy=24 / 31.5, trainer_busy=10 / 10.5
    )
    assert simulate(WORK, num_workers=4, staleness=1) == Pace(
        step_s=10.0, workers_busy=24 / 40, trainer_busy=1.0
    )


def test_staleness_hides_training_behind_sampling() -> None:
    assert simulate(WORK, num_workers=1, staleness=1) == Pace(
        step_s=24.0, workers_busy=1.0, trainer_busy=10 / 24
    )


def test_slow_rewards_hold_up_the_next_version_unless_it_may_be_older() -> None:
    """A version takes 6 + 14 + 10 seconds, during which one step or two more are under way."""
    slow = replace(WORK, reward_s=14.0)
    assert [step_s(slow, 4, staleness) for staleness in (0, 1, 2)] == [30.0, 15.0, 10.0]


@pytest.mark.parametrize("chunks", [1, 5, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("reward_s", "training_s"), [(0.0, 1.0), (4.0, 10.0), (9.0, 6.0)])
def test_one_process_is_between_bounds(
    chunks: int, num_workers: int, staleness: int, reward_s: float, training_s: float
) -> None:
    """A step is as long as its slowest stage, or its share of the way of a version.

    It is longer at most by what workers idle in a last round.
    """
    work = replace(WORK, chunks=chunks, reward_s=reward_s, training_s=training_s)
    rounds_s = 3 * math.ceil(chunks / num_workers)
    way_s = (rounds_s + reward_s + training_s) / (staleness + 1)
    shortest = max(3 * chunks / num_workers, training_s, way_s)
    longest = max(rounds_s, training_s, way_s)
    found = step_s(work, num_workers, staleness)
    # The mean is over whole steps, whose lengths may alternate.
    assert 0.98 * shortest <= found <= longest + 1e-9
    if staleness == 0:
        assert found == pytest.approx(way_s)


def test_processes_share_the_workers() -> None:
    """7 chunks of each of 2 processes are 14 of one while nobody samples ahead."""
    two = replace(WORK, chunks=7, num_processes=2)
    for num_workers in (1, 2, 4, 14):
        together = replace(WORK, chunks=14)
        assert step_s(two, num_workers) == step_s(together, num_workers)
    assert simulate(two, num_workers=2, staleness=0).workers_busy == 42 / (2 * (21 + 2 + 10))


def test_a_process_goes_on_while_another_one_samples() -> None:
    one = replace(WORK, chunks=3, training_s=1.0, reward_s=0.0)
    assert step_s(one, 2, staleness=2) == 4.5
    two = replace(one, num_processes=2)
    assert step_s(two, 2, staleness=2) == 9.0
    assert step_s(two, 4, staleness=2) == 4.5


@pytest.mark.parametrize(
    ("staleness", "number"),
    [
        (0, 8),  # 4 workers take 18 seconds, as 5 do, and 8 take 15
        (1, 4),
    ],
)
def test_how_many_workers_are_enough(staleness: int, number: int) -> None:
    assert enough_workers(WORK, staleness=staleness) == number


def test_a_gain_below_one_percent_is_none() -> None:
    """Compares steps of 1014, 1008 and 1005 seconds, or of 314, 308 and 305."""
    few = replace(WORK, chunks=4)
    assert enough_workers(replace(few, training_s=1000.0), staleness=0) == 1
    assert enough_workers(replace(few, training_s=300.0), staleness=0) == 2

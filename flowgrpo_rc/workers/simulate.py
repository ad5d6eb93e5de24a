"""Simulates how long a step takes with workers that sample, by discrete events and without Ray."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

_WARM_UP = 24  # steps before a run is steady
# Over which a step is averaged. With staleness k the lengths of steps may repeat every k + 1 steps.
_STEPS = 24
_GAIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Says what a step is made of.

    Attributes:
      chunks: chunks of one process of the trainer.
      num_processes: processes of the trainer; they share the workers, and train together.
      chunk_s: seconds of a worker for a chunk.
      reward_s: seconds from the last chunk of a step to its last reward.
      training_s: seconds of the trainer for everything else.
    """

    chunks: int
    num_processes: int
    chunk_s: float
    reward_s: float
    training_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Tells how fast a run goes once it is under way.

    Attributes:
      step_s: seconds of a step.
      workers_busy: share of the time that a worker samples.
      trainer_busy: share of the time that the trainer trains.
    """

    step_s: float
    workers_busy: float
    trainer_busy: float


def simulate(work: Work, *, num_workers: int, staleness: int) -> Pace:
    """Simulates a run with workers that sample.

    Step s is sampled with version max(0, s - 1 - staleness) of the LoRA; version v is what step v
    leaves. A process queues all chunks of a step as soon as this version is known. A free worker
    takes the chunk that has waited longest. The training of a step waits for the chunks and rewards
    of all processes, and for the step before.

    All workers are equal. Each has a core or a card of its own, and so has the trainer. Rewards
    take no time from either, and transport takes none.

    Args:
      work: what a step is made of.
      num_workers: how many workers there are, at least 1.
      staleness: how many steps the weights that sample may be behind.

    Returns:
      The mean over the last of many steps.
    """
    ends = _Run(work, num_workers, staleness).ends_of_steps(_WARM_UP + _STEPS)
    step_s = (ends[-1] - ends[_WARM_UP - 1]) / _STEPS
    sampling_s = work.chunks * work.num_processes * work.chunk_s
    return Pace(
        step_s=step_s,
        workers_busy=sampling_s / (num_workers * step_s),
        trainer_busy=work.training_s / step_s,
    )


def enough_workers(work: Work, *, staleness: int) -> int:
    """Returns the smallest number of workers that no larger number beats by 1% or more.

    One worker more may gain nothing where two more do: 8 chunks take 4 workers as long as 5.
    """
    # More have nothing to do.
    most = work.chunks * work.num_processes * (staleness + 1)

    def step_s(num_workers: int) -> float:
        return simulate(work, num_workers=num_workers, staleness=staleness).step_s

    best = step_s(most)
    numbers = range(1, most + 1)
    return numbers[
        bisect_left(numbers, True, key=lambda number: step_s(number) < (1 + _GAIN) * best)
    ]


class _Run:
    """A run of which only the time passes."""

    def __init__(self, work: Work, num_workers: int, staleness: int) -> None:
        self._work = work
        self._staleness = staleness
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0  # orders events of the same time
        self._free_workers = num_workers
        self._asked = [0] * work.num_processes  # steps that each process has queued
        self._chunks = [0] * work.num_processes  # that each process has, of all steps
        self._queue: deque[int] = deque()  # the process of each chunk that waits for a worker
        self._scored = 0  # steps that all rewards are known of
        self._trains = False
        self._ends: list[float] = []

    def ends_of_steps(self, number: int) -> list[float]:
        """Returns when the training of each of the first steps ends."""
        self._go_on()
        while len(self._ends) < number:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._go_on()
        return self._ends

    def _go_on(self) -> None:
        """Starts everything that nothing holds up any more."""
        work = self._work
        for process in range(work.num_processes):
            while self._asked[process] <= len(self._ends) + self._staleness:
                self._asked[process] += 1
                self._queue.extend([process] * work.chunks)
        while self._queue and self._free_workers:
            self._free_workers -= 1
            self._after(work.chunk_s, partial(self._have_chunk, self._queue.popleft()))
        if not self._trains and self._scored > len(self._ends):
            self._trains = True
            self._after(work.training_s, self._have_trained)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + seconds, self._num_events, happen))

    def _have_chunk(self, process: int) -> None:
        self._free_workers += 1
        before = self._steps_sampled()
        self._chunks[process] += 1
        if self._steps_sampled() > before:
            self._after(self._work.reward_s, self._have_rewards)

    def _steps_sampled(self) -> int:
        return min(self._chunks) // self._work.chunks

    def _have_rewards(self) -> None:
        self._scored += 1

    def _have_trained(self) -> None:
        self._trains = False
        self._ends.append(self._now)

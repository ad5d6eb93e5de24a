"""`flowgrpo-rc plan --workers`: how many workers a run needs, from the seconds that it measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from flowgrpo_rc.config.check_engine import chunk_size
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.reading import blaming, read_mapping
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder, flat_settings

_STALENESS = "rollout.staleness"
_STEP = "timing_s/step"
_ROLLOUT = "timing_s/rollout"
_REWARDS = "timing_s/reward_wait"
_BUSY = "workers/busy_fraction"
_GAIN = 0.01  # a smaller one is none
# Options of a plan that a run's folder answers, with their defaults.
_OF_THE_RUN = {"config_name": None, "config_dir": None, "processes": None, "nodes": 1, "fit": None}
_ASSUMED = """\
Computed, not measured. Assumed: a worker is as fast as what sampled in this run, and has a core or
a card of its own; rewards take no time from the trainer, and keep up with more workers; transport,
evaluations and checkpoints take none."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Says what a step is made of; seconds are medians over a run's steps without the first."""

    chunks: int
    chunk_s: float
    reward_s: float
    training_s: float

    def step_s(self, workers: int, staleness: int) -> float:
        """Returns the seconds of a step with workers that sample.

            max(training, sampling / workers, one version / (staleness + 1))

        A version of the weights is sampled in whole rounds of the workers, scored and trained on,
        and `staleness` + 1 versions are on their way at once. A strict run (0) has one, so that a
        step takes the sum.
        """
        sampling_s = self.chunks * self.chunk_s
        version_s = math.ceil(self.chunks / workers) * self.chunk_s + self.reward_s
        version_s += self.training_s
        return max(self.training_s, sampling_s / workers, version_s / (staleness + 1))

    def workers_busy(self, workers: int, staleness: int) -> float:
        """Returns the share of the time that a worker samples."""
        return self.chunks * self.chunk_s / (workers * self.step_s(workers, staleness))

    def trainer_busy(self, workers: int, staleness: int) -> float:
        """Returns the share of the time that the trainer trains."""
        return self.training_s / self.step_s(workers, staleness)

    def enough_workers(self, staleness: int) -> int:
        """Returns the smallest number of workers that no larger number beats by 1% or more."""
        # One worker more may gain nothing where two do: 8 chunks take 4 as long as 5.
        most = self.chunks * (staleness + 1)  # more have nothing to do
        longest = (1 + _GAIN) * self.step_s(most, staleness)
        return next(n for n in range(1, most + 1) if self.step_s(n, staleness) < longest)


def worker_tables(arguments: argparse.Namespace) -> str:
    """Returns how long a step of a run would take with workers, as text."""
    if arguments.measured is None:
        raise ValueError(
            "--workers needs measured seconds: give --measured RUN, the folder of a run of the "
            "same job that has taken at least two steps"
        )
    if arguments.workers is None:
        raise ValueError(f"--measured {arguments.measured} has no effect without --workers")
    if min(arguments.workers, default=1) < 1:
        raise ValueError(f"--workers {min(arguments.workers)}: give numbers of at least 1")
    for name, default in _OF_THE_RUN.items():
        if vars(arguments)[name] != default:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} has no effect with --measured: the run says what it is")
    folder = RunFolder(Path(arguments.measured).expanduser())
    steps, step_s, work = read_measured(folder)
    staleness = _staleness(folder, arguments.overrides)
    powers = [2**power for power in range(work.chunks.bit_length()) if 2**power < work.chunks]
    numbers = sorted(set(arguments.workers)) or [*powers, work.chunks]
    summary = (
        f"{folder.root}: medians of {steps} steps without the first\n"
        f"  {step_s:8.2f} s  a step\n"
        f"  {work.chunk_s:8.2f} s  sampling a chunk; {work.chunks} in a step\n"
        f"  {work.reward_s:8.2f} s  waiting for rewards after the last chunk\n"
        f"  {work.training_s:8.2f} s  everything else in the trainer"
    )
    tables = [
        "\n".join(_table(work, step_s, numbers, each)) for each in dict.fromkeys((0, staleness))
    ]
    return "\n\n".join([summary, *tables, _ASSUMED])


def read_measured(folder: RunFolder) -> tuple[int, float, Work]:
    """Reads the number of a run's steps, their seconds, and what they are made of."""
    where = f"--measured {folder.root}"
    if not folder.metrics.is_file():
        raise ValueError(
            f"{where}: there is no {folder.metrics.name} with the seconds of its steps (a "
            "calibration measures none); give the folder of a run"
        )
    config = stored_config(folder.config)
    rollout = config.rollout
    if config.data.replay_dir is not None:
        raise ValueError(
            f"{where}: it sampled nothing (data.replay_dir={config.data.replay_dir}); give a run "
            "that did"
        )
    if rollout.staleness > 0 and rollout.workers == 0:
        raise ValueError(
            f"{where}: its {_ROLLOUT} is the waiting for samples, since "
            f"{_STALENESS}={rollout.staleness}; give a run with {_STALENESS}=0 or with "
            "rollout.workers=1"
        )
    rows = [row for row in MetricsFile(folder.metrics).numbers() if row.get(_STEP)]
    # The first step is slower than the others.
    pairs = [pair for pair in pairwise(rows) if (_BUSY in pair[1]) == (rollout.workers > 0)]
    if not pairs:
        raise ValueError(
            f"{where}: it has no step with rollout.workers={rollout.workers} besides the first, "
            "which is slower; run at least two"
        )
    with blaming(f"{folder.root}: config.yaml, environment.json or metrics.jsonl"):
        processes = int(read_mapping(folder.root / "environment.json")["processes"])
        work = _work(config, processes, pairs)
        return len(pairs), median(row[_STEP] for _, row in pairs), work


def _work(config: Config, processes: int, pairs: Sequence[tuple[Row, Row]]) -> Work:
    """Returns what a step is made of; `pairs` have each step's row behind the one before."""

    def between_readings_s(before: Row, row: Row) -> float:
        evaluation, checkpoint = before.get("timing_s/evaluation"), row.get("timing_s/checkpoint")
        return float(row[_STEP] + (evaluation or 0.0) + (checkpoint or 0.0))

    rows = [row for _, row in pairs]
    each = math.ceil(config.samples_per_step(processes) / chunk_size(config))
    workers = config.rollout.workers
    if workers > 0:
        # The busy share is over all that lies between two readings.
        busy_s = median(row[_BUSY] * between_readings_s(before, row) for before, row in pairs)
        chunk_s = busy_s * workers / (each * processes)
    else:
        chunk_s = median(row[_ROLLOUT] for row in rows) / each
    found = Work(
        chunks=each * processes,
        chunk_s=chunk_s,
        reward_s=median(row[_REWARDS] for row in rows),
        training_s=median(row[_STEP] - row[_ROLLOUT] - row[_REWARDS] for row in rows),
    )
    if min(found.chunk_s, found.training_s) <= 0 or found.reward_s < 0:
        raise ValueError(f"a step of {found} is impossible")
    return found


def _staleness(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Returns the staleness that is asked for. ValueError if another setting is not the run's."""
    asked = stored_config(folder.config, overrides)
    there, here = (
        flat_settings(asdict(config)) for config in (stored_config(folder.config), asked)
    )
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key) and key != _STALENESS:
            raise ValueError(
                f"{key}={here.get(key)}: --measured {folder.root} was measured with "
                f"{there.get(key)}, and {_STALENESS} alone may differ"
            )
    asked.rollout.validate()
    return asked.rollout.staleness


def _table(work: Work, step_s: float, numbers: Sequence[int], staleness: int) -> Iterator[str]:
    """Yields the lines of the table for one staleness."""
    yield f"{_STALENESS}={staleness}{' (strict)' if staleness == 0 else ''}"
    yield "  workers  seconds of a step  times as fast  workers busy  trainer busy"
    for number in numbers:
        seconds = work.step_s(number, staleness)
        yield (
            f"  {number:7}  {seconds:17.2f}  {step_s / seconds:13.2f}"
            f"  {work.workers_busy(number, staleness):12.0%}"
            f"  {work.trainer_busy(number, staleness):12.0%}"
        )
    enough = work.enough_workers(staleness)
    idle = 1 - work.trainer_busy(enough, staleness)
    rest = f"more gain less than 1%, and the trainer waits for {idle:.0%} of the time"
    if idle < 0.01:
        rest = "sampling hides behind training"
    yield f"  {enough} {'are' if enough > 1 else 'is'} enough: {rest}"

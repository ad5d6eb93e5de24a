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
from flowgrpo_rc.workers.simulate import Work, enough_workers, simulate

_STALENESS = "rollout.staleness"
_STEP = "timing_s/step"
_ROLLOUT = "timing_s/rollout"
_REWARDS = "timing_s/reward_wait"
_BUSY = "workers/busy_fraction"
_WITHOUT_EFFECT = {
    "config_name": None,
    "config_dir": None,
    "processes": None,
    "nodes": 1,
    "fit": None,
}
_ASSUMED = """\
Simulated, not measured. Assumed: a worker is as fast as what sampled in this run, and has a core or
a card of its own; rewards take no time from the trainer, and keep up with more workers; transport,
evaluations and checkpoints take none."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """The seconds of a run: medians over its steps without the first.

    Attributes:
      num_steps: how many steps they are of.
      step_s: seconds of a step.
      work: what a step is made of.
    """

    num_steps: int
    step_s: float
    work: Work


def worker_tables(arguments: argparse.Namespace) -> str:
    """Returns how long a step of a run would take with workers, as text.

    Raises:
      ValueError: an option is missing or has no effect, a setting is not that of the run, or the
        run does not tell what is needed.
    """
    if arguments.measured is None:
        raise ValueError(
            "--workers needs measured seconds: give --measured RUN, the folder of a run of the "
            "same job that has taken at least two steps"
        )
    if arguments.workers is None:
        raise ValueError(f"--measured {arguments.measured} has no effect without --workers")
    if min(arguments.workers, default=1) < 1:
        raise ValueError(f"--workers {min(arguments.workers)}: give numbers of at least 1")
    for name, default in _WITHOUT_EFFECT.items():
        if vars(arguments)[name] != default:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} has no effect with --measured: the run says what it is")
    folder = RunFolder(Path(arguments.measured).expanduser())
    measured = read_measured(folder)
    staleness = _staleness(folder, arguments.overrides)
    work = measured.work
    most = work.chunks * work.num_processes
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    numbers = sorted(set(arguments.workers)) or [*powers, most]
    tables = ["\n".join(_table(measured, numbers, each)) for each in dict.fromkeys((0, staleness))]
    return "\n\n".join([_summary(folder, measured), *tables, _ASSUMED])


def read_measured(folder: RunFolder) -> MeasuredSteps:
    """Reads what a run measured.

    Raises:
      ValueError: this is no run, it took fewer than two steps, or its sampling has no seconds of
        its own.
    """
    if not folder.metrics.is_file():
        raise ValueError(
            f"--measured {folder.root}: there is no {folder.metrics.name}, which holds the seconds "
            "of a run's steps (a calibration measures none); give the folder of a run"
        )
    config = stored_config(folder.config)
    _check_samples(folder, config)
    rows = [row for row in MetricsFile(folder.metrics).numbers() if row.get(_STEP)]
    has_workers = config.rollout.workers > 0
    # The first step is slower than the others.
    pairs = [(before, row) for before, row in pairwise(rows) if (_BUSY in row) == has_workers]
    if not pairs:
        raise ValueError(
            f"--measured {folder.root}: it has no step with rollout.workers="
            f"{config.rollout.workers} besides the first, which is slower; run at least two"
        )
    with blaming(f"{folder.root}: config.yaml, environment.json or metrics.jsonl"):
        processes = int(read_mapping(folder.root / "environment.json")["processes"])
        return MeasuredSteps(
            num_steps=len(pairs),
            step_s=median(row[_STEP] for _, row in pairs),
            work=_work(config, processes, pairs),
        )


def _check_samples(folder: RunFolder, config: Config) -> None:
    """Raises ValueError if a run does not tell how long it sampled."""
    if config.data.replay_dir is not None:
        raise ValueError(
            f"--measured {folder.root}: it sampled nothing "
            f"(data.replay_dir={config.data.replay_dir}); give a run that did"
        )
    if config.rollout.staleness > 0 and config.rollout.workers == 0:
        raise ValueError(
            f"--measured {folder.root}: its {_ROLLOUT} is the waiting for samples, since "
            f"{_STALENESS}={config.rollout.staleness}; give a run with {_STALENESS}=0 or with "
            "rollout.workers=1"
        )


def _work(config: Config, processes: int, pairs: Sequence[tuple[Row, Row]]) -> Work:
    """Returns what a step is made of.

    Args:
      config: that of the run.
      processes: those of the trainer.
      pairs: the row of each step, behind that of the step before.
    """
    rows = [row for _, row in pairs]
    chunks = math.ceil(config.samples_per_step(processes) / chunk_size(config))
    workers = config.rollout.workers
    if workers > 0:
        busy_s = median(row[_BUSY] * _seconds_between(before, row) for before, row in pairs)
        chunk_s = busy_s * workers / (chunks * processes)
    else:
        chunk_s = median(row[_ROLLOUT] for row in rows) / chunks
    found = Work(
        chunks=chunks,
        num_processes=processes,
        chunk_s=chunk_s,
        reward_s=median(row[_REWARDS] for row in rows),
        training_s=median(row[_STEP] - row[_ROLLOUT] - row[_REWARDS] for row in rows),
    )
    if min(found.chunk_s, found.training_s) <= 0 or found.reward_s < 0:
        raise ValueError(f"a step of {found} is impossible")
    return found


def _seconds_between(before: Row, row: Row) -> float:
    """Returns the seconds over which the workers' busy share of a step is taken."""
    evaluation = before.get("timing_s/evaluation") or 0.0
    checkpoint = row.get("timing_s/checkpoint") or 0.0
    return float(row[_STEP] + evaluation + checkpoint)


def _staleness(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Returns the staleness that is asked for, by default that of the run.

    Raises:
      ValueError: another setting would change what the run measured.
    """
    run = stored_config(folder.config)
    asked = stored_config(folder.config, overrides)
    there, here = (flat_settings(asdict(config)) for config in (run, asked))
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key) and key != _STALENESS:
            raise ValueError(
                f"{key}={here.get(key)}: --measured {folder.root} was measured with "
                f"{there.get(key)}, and {_STALENESS} alone may differ"
            )
    asked.rollout.validate()
    return asked.rollout.staleness


def _summary(folder: RunFolder, measured: MeasuredSteps) -> str:
    """Returns the seconds that the tables follow from."""
    work = measured.work
    where = f" of each of {work.num_processes} processes" if work.num_processes > 1 else ""
    return (
        f"{folder.root}: medians of {measured.num_steps} steps without the first\n"
        f"  {measured.step_s:8.2f} s  a step\n"
        f"  {work.chunk_s:8.2f} s  sampling a chunk; {work.chunks} in a step{where}\n"
        f"  {work.reward_s:8.2f} s  waiting for rewards after the last chunk\n"
        f"  {work.training_s:8.2f} s  everything else in the trainer"
    )


def _table(measured: MeasuredSteps, numbers: Sequence[int], staleness: int) -> Iterator[str]:
    """Yields the lines of the table for one staleness."""
    yield f"{_STALENESS}={staleness}{' (strict)' if staleness == 0 else ''}"
    yield "  workers  seconds of a step  times as fast  workers busy  trainer busy"
    for number in numbers:
        pace = simulate(measured.work, num_workers=number, staleness=staleness)
        yield (
            f"  {number:7}  {pace.step_s:17.2f}  {measured.step_s / pace.step_s:13.2f}"
            f"  {pace.workers_busy:12.0%}  {pace.trainer_busy:12.0%}"
        )
    enough = enough_workers(measured.work, staleness=staleness)
    best = simulate(measured.work, num_workers=enough, staleness=staleness)
    are = "are" if enough > 1 else "is"
    idle = 1 - best.trainer_busy
    if idle < 0.01:
        rest = "sampling hides behind training"
    else:
        rest = f"more gain less than 1%, and the trainer waits for {idle:.0%} of the time"
    yield f"  {enough} {are} enough: {rest}"

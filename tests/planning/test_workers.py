"""`flowgrpo-rc plan --workers`: the formula, what it reads of a run, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compositions import config_of

from flowgrpo_rc.cli import main
from flowgrpo_rc.planning.workers import Work, read_measured
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder

# 96 samples in 8 chunks of 12. Steps: an evaluation alone, a slow first one, and three usual ones.
CHUNKS = "rollout.micro_batch_size_per_gpu=12"
EVALUATION = {"timing_s/evaluation": 5.0}
FIRST = {"timing_s/step": 90.0, "timing_s/rollout": 50.0, "timing_s/reward_wait": 9.0}
USUAL = {
    "timing_s/step": 36.0,
    "timing_s/rollout": 24.0,
    "timing_s/reward_wait": 2.0,
    "timing_s/old_log_prob": 1.0,
    "timing_s/update": 8.5,
    "timing_s/sync_weights": 0.5,
}
LONGER = USUAL | {"timing_s/step": 40.0, "timing_s/rollout": 27.0, "timing_s/reward_wait": 3.0}
SHORTER = USUAL | {"timing_s/step": 30.0, "timing_s/rollout": 19.0, "timing_s/reward_wait": 1.0}
ROWS = (EVALUATION, FIRST, LONGER, USUAL, SHORTER)
WORK = Work(chunks=8, chunk_s=3.0, reward_s=2.0, training_s=10.0)

Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes the files of a run that plan reads."""

    def write(
        *overrides: str, rows: Sequence[Mapping[str, float]] = ROWS, processes: Any = 1
    ) -> Path:
        root = tmp_path / "run"
        root.mkdir()
        config = config_of(CHUNKS, "rollout.dtype=bf16", *overrides)
        (root / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
        (root / "environment.json").write_text(json.dumps({"processes": processes}))
        file = MetricsFile(root / "metrics.jsonl")
        for step, row in enumerate(rows):
            file.append(step, row)
        return root

    return write


@pytest.mark.parametrize(
    ("workers", "staleness", "seconds"),
    [
        (1, 0, 24 + 2 + 10),  # one strict worker takes the sum
        (2, 0, 12 + 2 + 10),
        (3, 0, 9 + 2 + 10),  # three rounds, the last of which two of them sample
        (8, 0, 3 + 2 + 10),
        (9, 0, 3 + 2 + 10),  # more workers than chunks change nothing
        (1, 1, 24),  # training hides behind sampling
        (3, 1, (9 + 2 + 10) / 2),  # two versions are on their way
        (4, 1, 10),  # sampling hides behind training
        (3, 3, 10),
    ],
)
def test_a_step_takes_its_slowest_part(workers: int, staleness: int, seconds: float) -> None:
    assert WORK.step_s(workers, staleness) == seconds
    assert WORK.workers_busy(workers, staleness) == 24 / (workers * seconds)
    assert WORK.trainer_busy(workers, staleness) == 10 / seconds


def test_slow_rewards_hold_up_the_next_version_unless_it_may_be_older() -> None:
    slow = replace(WORK, reward_s=14.0)
    assert [slow.step_s(4, staleness) for staleness in (0, 1, 2)] == [30.0, 15.0, 10.0]


@pytest.mark.parametrize(
    ("work", "staleness", "number"),
    [
        (WORK, 0, 8),  # 4 workers take 18 seconds, as 5 do, and 8 take 15
        (WORK, 1, 4),
        (replace(WORK, chunks=4, training_s=1000.0), 0, 1),  # 1014, 1008 and 1005 seconds
        (replace(WORK, chunks=4, training_s=300.0), 0, 2),  # 314, 308 and 305
    ],
)
def test_how_many_workers_are_enough(work: Work, staleness: int, number: int) -> None:
    assert work.enough_workers(staleness) == number


def test_the_medians_of_a_run_without_workers(written: Written) -> None:
    assert read_measured(RunFolder(written())) == (3, 36.0, WORK)


def test_chunks_are_those_of_each_process(written: Written) -> None:
    """Splits the 48 samples of a process into 5 chunks, the last of which is smaller."""
    root = written("rollout.micro_batch_size_per_gpu=10", processes=2)
    _, _, work = read_measured(RunFolder(root))
    assert (work.chunks, work.chunk_s) == (10, 24 / 5)


def test_workers_tell_how_long_they_were_busy(written: Written) -> None:
    """3 workers, busy for half of a step of 30 s, of the evaluation before and the checkpoint."""
    waits = {"timing_s/rollout": 14.0, "timing_s/reward_wait": 0.0, "workers/busy_fraction": 0.5}
    row = FIRST | waits | {"timing_s/step": 30.0, "timing_s/evaluation": 14.0}
    saved = [row | {"timing_s/checkpoint": seconds} for seconds in (4.0, 2.0)]
    rows = (FIRST | waits | EVALUATION, row, *saved)
    root = written("rollout.workers=3", "rollout.staleness=1", rows=rows, processes=2)
    _, _, work = read_measured(RunFolder(root))
    # 35, 48 and 46 seconds lie between two readings.
    assert work == Work(chunks=8, chunk_s=3 * 0.5 * 46 / 8, reward_s=0.0, training_s=16.0)


def test_steps_before_a_run_got_workers_are_left_out(written: Written) -> None:
    rows = (FIRST, LONGER, USUAL | {"workers/busy_fraction": 1.0})
    steps, _, work = read_measured(RunFolder(written("rollout.workers=1", rows=rows)))
    assert (steps, work.chunk_s) == (1, 36 / 8)


def test_the_command(written: Written, capsys: pytest.CaptureFixture) -> None:
    root = written()
    words = ["plan", "rollout.staleness=1", "--measured", str(root), "--workers"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"{root}: medians of 3 steps without the first\n"
        "     36.00 s  a step\n"
        "      3.00 s  sampling a chunk; 8 in a step\n"
        "      2.00 s  waiting for rewards after the last chunk\n"
        "     10.00 s  everything else in the trainer\n"
    )
    strict = """\
rollout.staleness=0 (strict)
  workers  seconds of a step  times as fast  workers busy  trainer busy
        1              36.00           1.00           67%           28%
        2              24.00           1.50           50%           42%
        4              18.00           2.00           33%           56%
        8              15.00           2.40           20%           67%
  8 are enough: more gain less than 1%, and the trainer waits for 33% of the time
"""
    ahead = """\
rollout.staleness=1
  workers  seconds of a step  times as fast  workers busy  trainer busy
        1              24.00           1.50          100%           42%
        2              12.00           3.00          100%           83%
        4              10.00           3.60           60%          100%
        8              10.00           3.60           30%          100%
  4 are enough: sampling hides behind training
"""
    assert strict in shown
    assert ahead in shown
    assert "core or\na card of its own" in shown
    assert main([*words, "3", "2", "2"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    strict_and_ahead = [["2", "24.00"], ["3", "21.00"], ["2", "12.00"], ["3", "10.50"]]
    assert [row for row in rows if row and row[0] in "123"] == strict_and_ahead
    # Without an override the staleness is that of the run.
    assert main(["plan", "--measured", str(root), "--workers"]) == 0
    assert capsys.readouterr().out.count("workers  seconds") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers 2", "--workers needs measured seconds: give --measured RUN"),
        ("--measured {run}", "has no effect without --workers"),
        ("--measured {run} --workers 0", "--workers 0: give numbers of at least 1"),
        (
            "rollout.n=6 --measured {run} --workers",
            "rollout.n=6: --measured {run} was measured with 12, and rollout.staleness alone",
        ),
        ("rollout.staleness=-1 --measured {run} --workers", "staleness=-1: give at least 0"),
        (
            "--config-name token_grpo --measured {run} --workers",
            "--config-name has no effect with --measured",
        ),
        ("--nodes 2 --measured {run} --workers", "--nodes has no effect"),
    ],
)
def test_words_that_are_refused(
    written: Written, capsys: pytest.CaptureFixture, words: str, told: str
) -> None:
    run = written()
    assert main(["plan", *words.format(run=run).split()]) == 2
    assert told.format(run=run) in capsys.readouterr().err


def test_settings_stand_before_the_workers(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--workers", "2", "rollout.staleness=1"])
    assert "settings stand before --workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"rows": (EVALUATION, FIRST)}, "no step with rollout.workers=0 besides the first"),
        ({"rows": (FIRST, USUAL), "overrides": ["rollout.workers=2"]}, "no step with rollout.work"),
        ({"overrides": ["rollout.staleness=1"]}, "timing_s/rollout is the waiting for samples"),
        ({"overrides": ["data.replay_dir=rollouts"]}, "sampled nothing (data.replay_dir=rollouts)"),
        ({"rows": (FIRST, {"timing_s/step": 3.0})}, "'timing_s/rollout' is missing"),
        ({"rows": (FIRST, USUAL | {"timing_s/rollout": 0.0})}, "is impossible"),
        ({"rows": (FIRST, USUAL | {"timing_s/rollout": 35.0})}, "is impossible"),
        ({"processes": None}, "metrics.jsonl cannot be read"),
        ({"processes": 0}, "metrics.jsonl cannot be read"),
    ],
)
def test_runs_that_do_not_tell(written: Written, run: dict[str, Any], told: str) -> None:
    root = written(*run.pop("overrides", ()), **run)
    with pytest.raises(ValueError, match=f"{re.escape(str(root))}.*{re.escape(told)}"):
        read_measured(RunFolder(root))


def test_folders_that_are_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Such as that of a calibration, which holds no seconds."""
    (tmp_path / "calibration.json").write_text("{}")
    assert main(["plan", "--measured", str(tmp_path), "--workers"]) == 2
    assert "a calibration measures none" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["plan", "--measured", str(tmp_path), "--workers"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err

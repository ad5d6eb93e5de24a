"""The time to a reward: its seconds are those of training, of children too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from time_to_reward import summary
from time_to_reward_watch import Reading, Watched, watch


def test_seconds_count_from_the_first_iteration_and_without_it_being_loaded():
    readings = [Reading(0, 8.0, 100.0), Reading(1, 10.0, 101.0), Reading(2, 13.0, 103.0)]
    scored = {0: {"reward": 0.5, "exact": 0.1}, 2: {"reward": 0.7, "exact": 0.2}}
    found = summary(Watched([*readings, Reading(3, 15.0, 104.0)], 0.5), scored)
    assert (found["cpu_seconds"], found["wall_seconds"]) == ([0.0, 5.0], [0.0, 3.0])
    assert (found["iteration_cpu_seconds"], found["iteration_wall_seconds"]) == (2.0, 1.0)


def test_the_clocks_see_the_children_of_a_program(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    code = f"""
import subprocess, sys, time
def note(step):
    with open({str(rows)!r}, "a") as file:
        file.write('{{"step": %d}}\\n' % step)
    time.sleep(0.5)
note(0)
child = subprocess.Popen([sys.executable, "-c", {burn!r}], stdout=subprocess.PIPE)
child.stdout.readline()
note(1)
child.kill()
child.wait()
note(2)
"""
    seen = watch([sys.executable, "-c", code], rows, os.environ)
    before, alive, ended = seen.readings
    assert [reading.step for reading in seen.readings] == [0, 1, 2]
    assert alive.cpu - before.cpu > 0.3
    assert ended.cpu >= alive.cpu


def test_a_program_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(RuntimeError, match="no such thing"):
        watch(command, tmp_path / "rows.jsonl", os.environ)

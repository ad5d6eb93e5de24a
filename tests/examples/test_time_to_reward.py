"""The time to a reward: its arms are valid runs, and its seconds are those of training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import time_to_reward
import time_to_reward_figures
import time_to_reward_tables
from cells import Cell, load
from time_to_reward import Plan, Run, summary
from time_to_reward_arms import ARMS, PEER_ARMS, REFERENCE, REPEATS, RETIRED, STUDY, clock_name
from time_to_reward_watch import Reading, Watched, watch

from flowgrpo_rc.config.compose import compose_config, to_config


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm not in RETIRED])
@pytest.mark.parametrize("further", [(), time_to_reward.QUICK], ids=["whole", "quick"])
def test_every_arm_is_a_valid_run(arm: str, further: tuple[str, ...], tmp_path: Path) -> None:
    plan = Plan(150, time_to_reward.EVERY, 256, further, {}, tmp_path)
    config = to_config(compose_config(Run(arm, 3).overrides(plan, tmp_path)))
    assert (config.trainer.seed, config.trainer.test_freq) == (3, 0)
    assert config.trainer.save_freq == time_to_reward.EVERY


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


def run(arm: str, seed: int, *, reward: float = 0.7) -> Cell:
    return {
        "arm": arm,
        "seed": seed,
        "iterations": 50,
        "steps": [0, 50],
        "reward": [0.5, reward],
    }


def clock(arm: str, seconds: float, memory: float = 1.0) -> Cell:
    clocks = {f"iteration_{name}_seconds": seconds for name in ("cpu", "wall")}
    return {"arm": arm, **clocks, "peak_memory_gib": memory}


def test_the_table_compares_medians_and_takes_partial_data(tmp_path: Path) -> None:
    runs = [run(REFERENCE, seed, reward=reward) for seed, reward in ((1, 0.7), (2, 0.7), (3, 0.6))]
    runs += [run("shipped", 1), run("flow_grpo_fast", 1, reward=0.55)]
    clocks = [
        clock(REFERENCE, 4.0),
        clock("shipped", 2.0, memory=0.5),
        clock("flow_grpo_fast", 4.0),
    ]
    cells = {str(number): cell for number, cell in enumerate(runs)}
    cells |= {clock_name(cell["arm"]): cell for cell in clocks}
    found = time_to_reward_tables.ratios(cells).splitlines()
    rows = {row[0].strip("| `"): row[1:] for row in (line.split(" | ") for line in found[2:])}
    assert list(rows) == [arm for arm in (*ARMS, *PEER_ARMS) if arm not in REPEATS]
    assert rows["shipped"] == ["1", "0.700", "25", "38", *["0.50"] * 6, "0.50 |"]
    never = ["not reached"]
    assert rows["flow_grpo_fast"] == ["1", "0.550", *never * 2, *["1.00"] * 2, *never * 4, "1.00 |"]
    assert rows[REFERENCE] == ["3", "0.667", "25", "38", *["1.00"] * 6, "1.00 |"]
    assert rows["reuse"] == ["0", *["-"] * 9, "- |"]
    time_to_reward_figures.draw(cells, tmp_path / "figure.svg")
    assert ">shipped<" in (tmp_path / "figure.svg").read_text()


def test_without_the_reference_there_is_no_ratio():
    table = time_to_reward_tables.ratios({"a": run("shipped", 1)})
    assert f"| `shipped` | 1 | 0.700 | 25 | 38 |{' - |' * 7}" in table


def test_files_are_of_known_arms_whose_runs_have_one_length():
    runs = {name: cell for name, cell in load(STUDY).items() if name != clock_name(cell["arm"])}
    for name, cell in runs.items():
        assert name == time_to_reward.Run(cell["arm"], cell["seed"]).name
        assert cell["settings"] == time_to_reward.settings(cell["arm"])
    lengths = {(cell["arm"], cell["iterations"]) for cell in runs.values()}
    assert len(lengths) == len({arm for arm, _ in lengths})
    assert all(time_to_reward_tables.COMMON in cell["steps"] for cell in runs.values())

"""The benchmarks run and print their ratios."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import benchmark_decoupled
import pytest
import time_to_reward
from cells import load
from support.documented import ROOT
from support.launching import run_shell

from flowgrpo_rc.correction import auto_bands as auto_bands

RC = "algorithm.rollout_correction"


def test_the_benchmark_of_decoupled_mode_prints_its_ratios(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    given = [option for option in overrides if not option.startswith(RC)]
    monkeypatch.setattr(sys, "argv", ["benchmark_decoupled.py", "--rounds", "1", *given])
    benchmark_decoupled.main()
    found = re.findall(r"(\w+): (\d\.\d+) of bypass by the clock", capsys.readouterr().out)
    assert [arm for arm, _ in found] == ["bypass", "recomputed", "own"]
    assert found[0][1] == "1.000"


def test_the_benchmark_of_workers_prints_its_ratios(overrides: list[str], tmp_path: Path) -> None:
    script = ROOT / "examples" / "benchmarks" / "benchmark_workers.py"
    words = " ".join(["--rounds 1 --steps 1", *overrides])
    done = run_shell(f"{sys.executable} {script} {words}", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"ratio \d+\.\d+\n", done.stdout)) == 3


def test_the_benchmark_of_the_overhead_prints_its_ratio(tmp_path: Path) -> None:
    script = ROOT / "examples" / "benchmarks" / "benchmark_overhead.py"
    done = run_shell(f"{sys.executable} {script} --rounds 1 rollout.n=12", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"ratio \d\.\d+", done.stdout)


def test_the_benchmark_says_how_to_install_verl() -> None:
    script = ROOT / "examples" / "benchmarks" / "benchmark_correction.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "--install" in done.stdout


def test_the_time_to_reward_is_measured_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--quick", "--arms", "flow_grpo_fast", "--results", str(tmp_path)]
    time_to_reward.main(command)
    assert capsys.readouterr().out.split() == ["flow_grpo_fast_seed1"]
    cell = load(time_to_reward.STUDY, tmp_path)["flow_grpo_fast_seed1"]
    assert cell["steps"] == [0, 1, 2]
    for clock in ("cpu", "wall"):
        seconds = cell[f"{clock}_seconds"]
        assert seconds[0] == 0 < seconds[1] < seconds[2]
    assert cell["setup_cpu_seconds"] > 0
    time_to_reward.main(command)
    assert capsys.readouterr().out == ""
    time_to_reward.main([*command, "--clock"])
    clocked = load(time_to_reward.STUDY, tmp_path)["clock_flow_grpo_fast"]
    assert clocked["iteration_cpu_seconds"] > 0 < clocked["iteration_wall_seconds"]
    assert "seed" not in clocked

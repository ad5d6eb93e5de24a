"""The benchmarks run and print their ratios."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import benchmark_decoupled
import benchmark_overhead
import pytest
import time_to_reward
from cells import load

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


def test_the_benchmark_of_the_overhead_prints_its_ratio(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark_overhead.py", "--rounds", "1", *overrides])
    benchmark_overhead.main()
    assert re.search(r"ratio \d\.\d+", capsys.readouterr().out)


def test_the_time_to_reward_is_measured(tmp_path: Path) -> None:
    time_to_reward.main(["--quick", "--arms", "bundled", "--results", str(tmp_path)])
    cell = load(time_to_reward.STUDY, tmp_path)["bundled_seed1"]
    assert cell["steps"] == [0, 1, 2]
    for clock in ("cpu", "wall"):
        seconds = cell[f"{clock}_seconds"]
        assert seconds[0] == 0 < seconds[1] < seconds[2]
    assert cell["setup_cpu_seconds"] > 0


def test_an_iteration_is_timed_in_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--quick", "--results", str(tmp_path), "--rounds", "2", "--clock", "levers"]
    time_to_reward.main([*own, "--arms", "bundled", "rollout.dtype=auto"])
    cell = load(time_to_reward.STUDY, tmp_path)["levers"]
    for arm in ("bundled", "rollout.dtype=auto"):
        for name in ("iteration_cpu_seconds", "iteration_wall_seconds", "peak_memory_gib"):
            assert len(cell["arms"][arm][name]) == 2
            assert min(cell["arms"][arm][name]) > 0
    assert re.search(r"\|`rollout.dtype=auto`\|-?\d+%\|", capsys.readouterr().out)

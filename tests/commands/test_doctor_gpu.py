"""`doctor --gpu` on what there is: every check runs on a CPU, and each fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowgrpo_rc.cli import main
from flowgrpo_rc.commands import doctor, doctor_gpu
from flowgrpo_rc.commands.doctor_gpu import Finding
from flowgrpo_rc.config.check_engine import missing_for_compiling
from flowgrpo_rc.rollout import devices

CPU = torch.device("cpu")


def test_checks_without_a_run() -> None:
    assert doctor_gpu.check_device(CPU).state == "skipped"
    assert doctor_gpu.check_memory(CPU).state == "skipped"
    attention = doctor_gpu.check_attention(CPU)
    assert attention.state == "ok"
    assert "flash" in attention.found
    assert "differ" not in attention.found
    processes = doctor_gpu.check_processes(CPU)
    assert processes.state == "ok", processes.found
    assert "2 processes added 64 MiB over gloo" in processes.found
    decoding = doctor_gpu.check_decoding(CPU, 64)
    assert decoding.state == "ok"
    assert "of 64 x 64 in fp32" in decoding.found


@pytest.mark.parametrize(("gain", "state"), [(9, "slow"), (1, "ok")])
def test_onednn_is_advised_where_it_is_faster(monkeypatch, gain: int, state: str) -> None:
    seconds = iter([[0.9], [0.9 / gain]])
    monkeypatch.setattr(devices.timeit, "repeat", lambda *_, **__: next(seconds))
    found = doctor.check_products()
    assert found.state == state
    assert ("set model.onednn=auto" in found.advice) == (state == "slow")


def test_the_rollouts_of_the_bundled_model() -> None:
    found = doctor_gpu.check_rollout()
    assert found.state == "ok"
    assert "mean mismatch" in found.found


def test_a_job_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"rollout\.n=1"):
        doctor_gpu._job("rollout.n=1")


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"actor/rollout_corr/mismatch_over_expected": 1.9}, "ok"),
        ({"actor/rollout_corr/mismatch_over_expected": 2.1}, "broken"),
        ({}, "ok"),
    ],
)
def test_a_mismatch_beyond_the_precision_is_a_fault(row: dict[str, float], state: str) -> None:
    common = {"actor/rollout_corr/logprob_abs_diff_mean": 1e-4, "perf/samples_per_second": 3.0}
    assert doctor_gpu._mismatch({**row, **common}).state == state


@pytest.mark.parametrize(("largest", "state"), [(0.0, "ok"), (1e-7, "ok"), (1e-4, "broken")])
def test_a_replay_that_differs(monkeypatch: pytest.MonkeyPatch, largest: float, state: str) -> None:
    row = {"actor/rollout_corr/logprob_abs_diff_max": largest, "perf/samples_per_second": 3.0}
    monkeypatch.setattr(doctor_gpu, "_job", lambda *_: row)
    assert doctor_gpu.check_fp32().state == state


def test_a_missing_package_is_named_as_wheel_and_clone_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_gpu, "find_spec", lambda _: None)
    found = dict(doctor_gpu.gpu_checks(CPU))["int8 rollout"]()
    assert found.state == "skipped"
    assert found.found.startswith("needs torchao: pip install 'torchao>=")


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = doctor_gpu.check_compilers(CPU)
    assert (found.state, found.found) == ("broken", "missing: a C++ compiler (g++ or clang++)")
    assert dict(doctor_gpu.gpu_checks(CPU))["compiled rollout"]().state == "skipped"


def test_the_compiler_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "icx" else None)
    monkeypatch.setenv("CXX", "icx")
    assert missing_for_compiling(CPU) == []
    monkeypatch.setenv("CXX", "gone")
    assert missing_for_compiling(CPU) == ["a C++ compiler (gone)"]


def test_processes_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no link')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor_gpu.check_processes(CPU)
    assert found.state == "broken"
    assert "NCCL_DEBUG=INFO" in found.advice


def fails() -> Finding:
    raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize(("check", "code"), [(lambda: Finding("slow", "x", "do y"), 0), (fails, 1)])
def test_the_table_and_the_file(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    check: Callable[[], Finding],
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "installation_checks", list)
    monkeypatch.setattr(doctor, "gpu_checks", lambda _: [("first", check)])
    out = tmp_path / "gpu.json"
    assert main(["doctor", "--gpu", "--out", str(out)]) == code
    told = json.loads(out.read_text())["first"]
    assert told["state"] == ("broken" if code else "slow")
    assert told["state"] in capsys.readouterr().out


def test_a_row_is_printed_before_the_next_check(capsys: pytest.CaptureFixture) -> None:
    printed = []

    def second() -> Finding:
        printed.append(capsys.readouterr().out)
        return Finding("ok", "")

    doctor.report("all", [("first", lambda: Finding("slow", "a[b]", "do y")), ("second", second)])
    assert printed[0].split() == ["all", "first", "slow", "a[b]", "do", "y"]


def test_a_file_needs_the_gpu_checks(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--out", "x.json"]) == 2
    assert "--out x.json has no effect without --gpu" in capsys.readouterr().err

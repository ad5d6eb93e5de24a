"""`doctor` prints each check as soon as it is done, and names what is broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

from flowgrpo_rc.cli import main
from flowgrpo_rc.commands import doctor
from flowgrpo_rc.commands.doctor import Finding
from flowgrpo_rc.spec.check_engine import missing_for_compiling

CPU = torch.device("cpu")


def test_the_compiler_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "icx" else None)
    monkeypatch.setenv("CXX", "icx")
    assert missing_for_compiling(CPU) == []
    monkeypatch.setenv("CXX", "gone")
    assert missing_for_compiling(CPU) == ["a C++ compiler (gone)"]


def fails() -> Finding:
    raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize(("check", "code"), [(lambda: Finding("slow", "x", "do y"), 0), (fails, 1)])
def test_only_what_is_broken_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    check: Callable[[], Finding],
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "installation_checks", lambda: [("first", check)])
    assert main(["doctor"]) == code
    assert ("broken" if code else "slow") in capsys.readouterr().out


def test_a_row_is_printed_before_the_next_check(capsys: pytest.CaptureFixture) -> None:
    printed = []

    def second() -> Finding:
        printed.append(capsys.readouterr().out)
        return Finding("ok", "")

    doctor.report("all", [("first", lambda: Finding("slow", "a[b]", "do y")), ("second", second)])
    assert printed[0].split() == ["all", "first", "slow", "a[b]", "do", "y"]

"""Checks which processes stay on a core of their own."""

from __future__ import annotations

import pytest
from support.compositions import job_spec

from flowgrpo_rc.spec import cores
from flowgrpo_rc.spec.cores import stay_on_own_core


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Collects what the second of two processes on the cores 3 and 5 is bound to."""
    calls: list[set[int]] = []
    monkeypatch.setattr(cores, "is_child", lambda: True)
    monkeypatch.setattr(cores.sys, "platform", "linux")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {5, 3}, raising=False)
    monkeypatch.setattr(
        cores.os, "sched_setaffinity", lambda pid, given: calls.append(given), raising=False
    )
    for name, value in {"WORLD_SIZE": 2, "LOCAL_RANK": 1, "OMP_NUM_THREADS": 1}.items():
        monkeypatch.setenv(name, str(value))
    return calls


def bind(*settings: str, device: str = "cpu") -> None:
    stay_on_own_core(job_spec("trainer.num_processes=2", *settings, device=device))


def test_a_process_stays_on_the_core_of_its_rank(bound: list[set[int]]) -> None:
    bind()
    assert bound == [{5}]


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "1"), ("WORLD_SIZE", "4"), ("OMP_NUM_THREADS", "2")]
)
def test_other_numbers_of_processes_or_threads_are_left_to_the_system(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    spec = job_spec()
    monkeypatch.setenv(name, value)
    stay_on_own_core(spec)
    assert bound == []


def test_the_system_decides_about_engines_other_devices_and_other_launchers(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bind("rollout.workers=1")
    bind("rollout.name=vllm_omni")
    bind(device="cuda")
    monkeypatch.setattr(cores, "is_child", lambda: False)
    bind()
    assert bound == []


def test_a_system_that_refuses_is_no_error(
    bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, given: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(cores.os, "sched_setaffinity", refuse)
    bind()

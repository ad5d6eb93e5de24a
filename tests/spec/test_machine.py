"""Checks which device a run takes, and how many processes and threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.compositions import config_of, job, resolved

from flowgrpo_rc.commands import doctor
from flowgrpo_rc.spec import machine
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.machine import (
    device_of,
    limit_threads,
    num_processes,
    processes_here,
    usable_cores,
)
from flowgrpo_rc.spec.run_spec import shares_evenly

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started this process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def sizes(mini: int, micro: int) -> list[str]:
    return [
        f"data.train_batch_size={mini}",
        "rollout.n=12",
        "actor.train_n=null",
        f"actor.ppo_mini_batch_size={mini}",
        f"actor.ppo_micro_batch_size_per_gpu={micro}",
    ]


@pytest.mark.parametrize(
    ("mini", "micro", "most", "expected"),
    [
        (2, 12, 1, 1),
        (2, 12, 2, 2),
        (2, 12, 64, 2),
        (2, 24, 64, 1),  # the share of each of two would be half a micro-batch
        (12, 12, 8, 6),
        (12, 24, 64, 6),
        (5, 12, 4, 1),
    ],
)
def test_auto_is_the_largest_number_that_shares_evenly(
    monkeypatch: pytest.MonkeyPatch, mini: int, micro: int, most: int, expected: int
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: most)
    config = job("trainer.num_processes=auto", *sizes(mini, micro))
    assert num_processes(config, CPU) == expected
    check_settings(resolved(config, expected))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: most)
    assert num_processes(config, torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [
        (["rollout.workers=2"], 6, 6),
        (["rollout.workers=2", "rollout.cpus_per_worker=3"], 2, 6),
        (["rollout.workers=4", "rollout.gpus_per_worker=0.5"], 4, 6),
        (["rollout.workers=9"], 1, 1),
        (["rollout.workers=9", "rollout.ray_address=10.0.0.1:6379"], 6, 6),
    ],
)
def test_auto_leaves_workers_what_they_need(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], on_cpu: int, on_gpu: int
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = job("trainer.num_processes=auto", *sizes(12, 12), *settings)
    assert num_processes(config, CPU) == on_cpu
    assert num_processes(config, torch.device("cuda")) == on_gpu


def test_one_process_drives_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = job("trainer.num_processes=4", *sizes(12, 1))
    assert num_processes(config, CPU) == 4
    with pytest.raises(ValueError, match=r"trainer\.num_processes=4: .* 2 are visible"):
        num_processes(config, torch.device("cuda"))


def test_shares_are_even_exactly_where_the_check_passes() -> None:
    config = job(*sizes(12, 6))
    for number in range(1, 30):
        if shares_evenly(config, number):
            check_settings(resolved(config, number))
        else:
            with pytest.raises(ValueError, match=r"ppo_mi\w+_batch_size"):
                check_settings(resolved(config, number))


@pytest.mark.parametrize(("mini", "micro", "number"), [(4, 6, 8), (24, 9, 5), (24, 9, 6)])
def test_an_uneven_share_proposes_the_nearest_sizes_that_work(mini, micro, number):
    config = job(*sizes(mini, micro))
    with pytest.raises(ValueError, match=r": (start|give) \d+ ") as error:
        check_settings(resolved(config, number))
    words = re.split(": start|give", str(error.value))[1:]
    proposed = [[int(size) for size in re.findall(r"\d+", each)] for each in words]

    def nearest(given: int, works: Callable[[int], bool]) -> list[int]:
        below = [size for size in range(1, given) if works(size)]
        return below[-1:] + [size for size in range(given + 1, 300) if works(size)][:1]

    def fits(key: str, size: int) -> bool:
        return shares_evenly(replace(config, actor=replace(config.actor, **{key: size})), number)

    if mini % number == 0:
        assert proposed == [nearest(micro, partial(fits, "ppo_micro_batch_size_per_gpu"))]
    else:
        sizes_that_fit = nearest(mini, partial(fits, "ppo_mini_batch_size"))
        assert proposed == [nearest(number, partial(shares_evenly, config)), sizes_that_fit]


def test_replay_takes_as_many_processes_as_were_recorded(tmp_path: Path) -> None:
    config = job("trainer.num_processes=auto", f"data.replay_dir={tmp_path}", *sizes(12, 1))
    assert num_processes(config, CPU) == 1
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001_process_0_of_3.safetensors").touch()
    assert num_processes(config, CPU) == 3


@pytest.mark.parametrize("asked", ["auto", "1", "2"])
def test_a_launcher_has_decided(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = job(f"trainer.num_processes={asked}")
    assert num_processes(config, CPU) == processes_here(config) == 2
    with pytest.raises(ValueError, match=r"trainer\.num_processes=4, .* has started 2"):
        num_processes(job("trainer.num_processes=4"), CPU)


def test_a_run_inside_a_program_starts_none() -> None:
    assert processes_here(job("trainer.num_processes=auto")) == 1
    with pytest.raises(ValueError, match=r"trainer\.num_processes=2: only the command"):
        processes_here(job("trainer.num_processes=2"))


@pytest.mark.parametrize("asked", ["0", "many", "true", "null"])
def test_wrong_numbers_are_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.num_processes"):
        config_of(f"trainer.num_processes={asked}")


@pytest.mark.parametrize(
    ("quota", "threads", "expected"),
    [
        ("max 100000", "", 8),
        ("250000 100000", "", 2),
        ("50000 100000", "", 1),
        ("max 100000", "1", 8),
        ("max 100000", "3", 2),
        ("max 100000", "16", 1),
        ("max 100000", "4,2", 8),
    ],
)
def test_cores_are_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, threads: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert usable_cores() == expected


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch would use four threads, and nobody has said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 3), (4, 4), (16, 4)])
def test_two_cores_get_one_thread_and_more_cores_keep_torch_s_number(
    four_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cores: int,
    threads: int,
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    limit_threads()
    assert torch.get_num_threads() == threads
    assert ("OMP_NUM_THREADS sets another number" in capsys.readouterr().out) == (threads < 4)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "WORLD_SIZE"])
def test_a_user_or_a_launcher_decides_about_threads(
    four_threads: None, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setenv(variable, "1")
    limit_threads()
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("count", "warns"), [(1, False), (8, True)])
def test_gpus_that_are_not_used_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int, warns: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert num_processes(job("trainer.num_processes=1"), torch.device("cuda")) == 1
    assert ("8 GPUs are visible" in caplog.text) is warns


def test_cuda_by_name_is_an_error_without_it(monkeypatch):
    config = job("trainer.device=cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"trainer\.device=cuda: torch .* sees no GPU.*=auto"):
        device_of(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(config) == torch.device("cuda")


@pytest.mark.parametrize("visible", [None, "0", ""])
def test_a_driver_that_torch_cannot_use_is_an_error(monkeypatch, tmp_path, visible):
    """A run would go to the CPU without a word, on a machine with a GPU."""
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module 550.54.15")
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = job("trainer.device=auto")
    if visible == "":  # whoever hides the GPUs wants the CPU
        assert device_of(config) == torch.device("cpu")
    else:
        with pytest.raises(ValueError, match=r"has an NVIDIA driver; .*trainer\.device=cpu"):
            device_of(config)
    check = ("device", dict(doctor.installation_checks())["device"])
    finding = doctor.report("doctor", [check])["device"]
    assert finding.state == ("ok" if visible == "" else "broken")
    assert device_of(job("trainer.device=cpu")) == torch.device("cpu")

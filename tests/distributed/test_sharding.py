"""Replicated or sharded: which strategy a launcher asks for."""

from __future__ import annotations

import pytest

from flowgrpo_rc.cli import main
from flowgrpo_rc.distributed.sharding import resolve_strategy


@pytest.mark.parametrize(
    ("launcher", "given", "expected"),
    [
        ({}, "auto", "ddp"),
        ({}, "fsdp2", "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "auto", "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "ddp", "ddp"),
    ],
)
def test_the_strategy_follows_the_launcher(monkeypatch, launcher, given, expected):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert resolve_strategy(given) == expected


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version=1"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading=true"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params=true"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward=false"),
    ],
)
def test_launcher_settings_that_are_refused(monkeypatch, overrides, capsys, launcher, words):
    for name, value in ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | launcher).items():
        monkeypatch.setenv(name, value)
    assert main(["train", *overrides]) == 2
    assert words in capsys.readouterr().err

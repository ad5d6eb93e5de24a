"""Launches that do not fit are refused; gradients are added in place."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launching import launch

from flowgrpo_rc.cli import main
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy

GRADIENTS = """
import torch
from accelerate import Accelerator
from flowgrpo_rc.planning.activations import PeakMemory
from flowgrpo_rc.distributed.processes import Processes

accelerator = Accelerator(cpu=True)
processes = Processes(accelerator)
generator = torch.Generator().manual_seed(processes.rank)
parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (200, 50))]
for parameter in parameters:
    parameter.grad = torch.randn(parameter.shape, generator=generator)
if processes.rank == 1:
    parameters[1].grad = None
own = [torch.zeros(p.shape) if p.grad is None else p.grad.clone() for p in parameters]
kept = parameters[2].grad
with PeakMemory() as memory:
    processes.sum_gradients(parameters)
assert memory.peak < 1.1 * 4 * sum(p.numel() for p in parameters), memory.peak
assert parameters[2].grad is kept
for parameter, gradient in zip(parameters, own):
    assert torch.equal(parameter.grad, accelerator.reduce(gradient, reduction="sum"))
processes.close()
"""


def test_gradients_are_added_in_one_flat_copy(tmp_path: Path) -> None:
    """The sums are those of accelerate, bit for bit."""
    program = tmp_path / "gradients.py"
    program.write_text(GRADIENTS)
    launch(2, str(program))


@pytest.mark.parametrize(
    ("given", "used"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_a_gpu_has_its_number(monkeypatch: pytest.MonkeyPatch, given: str, used: str) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    accelerator = SimpleNamespace(
        process_index=0, num_processes=1, is_main_process=True, device=torch.device(given)
    )
    assert Processes(accelerator).device == torch.device(used)


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

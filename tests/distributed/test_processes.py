"""A number of processes that does not fit is refused, and gradients are added in place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launching import launch

from flowgrpo_rc.distributed.processes import Processes

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


def test_a_number_of_processes_that_does_not_fit(train, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("actor.ppo_mini_batch_size=1") == 2
    assert "actor.ppo_mini_batch_size=1" in capsys.readouterr().err


def test_gradients_are_added_in_one_flat_copy(tmp_path: Path) -> None:
    """The sums are those of accelerate, bit for bit."""
    program = tmp_path / "gradients.py"
    program.write_text(GRADIENTS)
    done = launch(2, str(program))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("given", "used"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_a_gpu_has_its_number(monkeypatch: pytest.MonkeyPatch, given: str, used: str) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    accelerator = SimpleNamespace(
        process_index=0, num_processes=1, is_main_process=True, device=torch.device(given)
    )
    assert Processes(accelerator).device == torch.device(used)

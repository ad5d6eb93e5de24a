"""The learning rate, and the 8-bit optimizer."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.modes import make_update
from support.runs import fingerprint
from support.torchao import needs_torchao
from torch import nn

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.records.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from flowgrpo_rc.records.optimizer_state import optimizer_tensors
from flowgrpo_rc.training import optim
from flowgrpo_rc.training.config import OPTIMIZERS, ActorConfig, EMAConfig, OptimConfig
from flowgrpo_rc.training.optim import drowned_by_eps, make_optimizer, make_schedule
from flowgrpo_rc.training.update import PolicyUpdate


@pytest.mark.parametrize(
    ("name", "warmup", "wanted"),
    [("constant", 0, [1, 1, 1]), ("constant", 2, [0, 0.5, 1]), ("linear", 0, [1, 0.9, 0.8])],
)
def test_learning_rate(name: str, warmup: int, wanted: list[float]) -> None:
    settings = OptimConfig(lr=1e-3, lr_scheduler=name, lr_warmup_steps=warmup)
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], settings)
    schedule = make_schedule(optimizer, settings, total_updates=10)
    rates = []
    for _ in range(3):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1e-3 * factor for factor in wanted])


@pytest.mark.parametrize(("steps", "wanted"), [(0, (0, 0)), (1, (1, 8)), (3, (3, 8))])
def test_what_eps_drowns_is_counted_by_the_unbiased_moment(
    steps: int, wanted: tuple[int, int]
) -> None:
    """Counts eight elements; those of the other parameter never have a gradient."""
    parameters = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(24))]
    optimizer = make_optimizer(parameters, OptimConfig(betas=[0.9, 0.5]))
    gradient = torch.full((8,), 1e-3)
    gradient[:3] = torch.tensor([0.9e-8, 1.1e-8, -1.1e-8])
    parameters[1].grad = torch.zeros(24)
    for step in range(steps):
        # v_hat is g^2 after the first step, and 1/7 of that after two more without gradient.
        parameters[0].grad = gradient if step == 0 else 0 * gradient
        optimizer.step()
    assert tuple(count.item() for count in drowned_by_eps(optimizer)) == wanted


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_the_first_8_bit_step_is_that_of_adamw() -> None:
    """Moments are rounded after their use, so the first step is exact.

    A moment takes a byte and a share of a scale.
    """
    parameters = [nn.Parameter(normal((64, 128), [1], name)[0]) for name in "ab"]
    parameters[1].data.copy_(parameters[0])
    optimizers = []
    for parameter, name in zip(parameters, OPTIMIZERS, strict=True):
        optimizers.append(
            make_optimizer([parameter], OptimConfig(name=name, lr=0.01, weight_decay=0.1))
        )
        parameter.grad = normal((64, 128), [2])[0]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.step()
        apart = (parameters[0] - parameters[1]).abs().max()
        assert apart < 1e-6 if step == 0 else 1e-6 < apart < 0.03
    counted = [drowned_by_eps(optimizer)[1].item() for optimizer in optimizers]
    assert counted == [64 * 128, 0]
    stored = optimizer_tensors(optimizers[1], {"p": parameters[1]})
    assert stored["p.exp_avg.codes"].dtype == torch.uint8
    assert stored["p.exp_avg.scale"].numel() == 64 * 128 // 256


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_a_state_survives_a_checkpoint_bit_for_bit(
    bundled: FlowModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(optim, "SMALLEST_8BIT", 0)
    settings = OptimConfig(name=name, lr=1e-3, lr_scheduler="linear")
    average = EMAConfig(update_interval=1)
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=4, optim=settings, ema=average)
    update, batch = make_update(bundled, actor)
    update.run(batch, 4)
    checkpoint = Checkpoint(step=1, tensors=update.tensors(), state={"update": update.state()})
    path = save_checkpoint(tmp_path, checkpoint, keep=1)
    update.run(batch, 4)
    wanted = {key: fingerprint(tensors) for key, tensors in update.tensors().items()}
    state = update.state()
    loaded = load_checkpoint(path)
    processes = Processes(Accelerator(cpu=True))
    fresh = PolicyUpdate(update._algorithm, actor, processes, total_updates=10)
    fresh.load(loaded.tensors, loaded.state["update"])
    fresh.run(batch, 4)
    assert {key: fingerprint(tensors) for key, tensors in fresh.tensors().items()} == wanted
    assert fresh.state() == state


@needs_torchao
def test_8_bits_for_small_tensors_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"adamw_8bit has no effect: the largest LoRA tensor has 16 .*model\.lora_rank",
    ):
        make_optimizer([nn.Parameter(torch.zeros(4, 4))], OptimConfig(name="adamw_8bit"))

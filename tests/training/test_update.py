"""The update: gradients that are not finite, the average of the weights, the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from policies.test_flow import WINDOWS, make_spec, sample, trained_lora

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.losses.diffusion import DiffusionObjective
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters, reference_policy
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.ema import EMAConfig, averaged_weights
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import NonFiniteGradient, PolicyUpdate


def make(model: FlowModel, actor: ActorConfig) -> tuple[PolicyUpdate, DiffusionBatch]:
    transformer = trained_lora(model)
    batch, _ = sample(model, transformer, make_spec("sde", 1.0), WINDOWS["first"])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5]).unsqueeze(1).expand(4, 2)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs, advantages=advantages)
    loss = LossConfig(
        diffusion_loss=DiffusionLossConfig(clip_ratio=1e-3),
        rollout_correction=RolloutCorrectionConfig(),
    )
    policy = FlowPolicy(model, transformer)
    return PolicyUpdate(
        policy,
        actor,
        DiffusionObjective(loss).terms,
        Processes(Accelerator(cpu=True)),
        total_updates=10,
    ), batch


def test_a_gradient_that_is_not_finite_skips_counts_and_ends_the_run(model: FlowModel) -> None:
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=4, optim=OptimConfig(lr=1e-3, max_nonfinite_updates=3)
    )
    update, batch = make(model, actor)
    poisoned = batch.replace(advantages=torch.full((4, 2), torch.nan))
    before = {name: tensor.clone() for name, tensor in update.lora_state().items()}
    for count in (1, 2):
        metrics = update.run(poisoned, 4).compute()
        assert metrics["nonfinite_updates"] == count
        assert metrics["nonfinite_update_fraction"] == 1
        assert "grad_norm" not in metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in update.lora_state().items())
    update.run(batch, 4)  # a good update ends the row of bad ones
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in update.lora_state().items()
    )
    update.run(poisoned, 4)
    update.run(poisoned, 4)
    with pytest.raises(NonFiniteGradient, match=r"actor\.optim\.max_nonfinite_updates"):
        update.run(poisoned, 4)


def test_gradient_equals_one_big_batch(model: FlowModel) -> None:
    """Micro-batches of one step add up to the gradient of the mean over the whole mini-batch."""
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=2, optim=OptimConfig(lr=1e-3, clip_grad=1e9))
    update, batch = make(model, actor)
    policy = FlowPolicy(model, model.transformer)
    total = 0.0
    for t in range(2):
        step = policy.evaluate(batch.step(t))
        x_next = batch.all_latents[:, t + 1]
        ratio = torch.exp(log_prob(step.transition, x_next) - batch.rollout_log_probs[:, t])
        total = total - (batch.advantages[:, t] * ratio).sum() / 8
    wanted = torch.autograd.grad(total, update.parameters, allow_unused=True)
    norm = torch.sqrt(
        sum(gradient.double().pow(2).sum() for gradient in wanted if gradient is not None)
    )
    found = update.run(batch, 4).compute()
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert found["pg_loss"] == pytest.approx(0.0, abs=1e-6)


def test_average_and_its_reversal(model: FlowModel) -> None:
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=4, optim=OptimConfig(lr=1e-3), ema=EMAConfig(update_interval=2)
    )
    update, batch = make(model, actor)
    values = []
    for _ in range(4):
        update.run(batch, 4)
        values.append({name: tensor.clone() for name, tensor in update.lora_state().items()})
    before = update.lora_state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with averaged_weights(update.ema, update.parameters):
        for name, average in update.lora_state().items():
            # The first average takes the value, the second moves by 1 - 2 / 11.
            first, second = values[1][name], values[3][name]
            torch.testing.assert_close(average, first + (1 - 2 / 11) * (second - first))
    assert all(torch.equal(kept[name], tensor) for name, tensor in update.lora_state().items())


def test_reference_policy_is_the_base_model_bitwise(model: FlowModel) -> None:
    latents = torch.randn(2, 8, 8, 16, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([900.0, 10.0])
    conditioning = model.encode(["a", "b"], max_sequence_length=16)
    arguments = (latents, timesteps, conditioning, None, make_spec("sde", 1.0))
    with torch.no_grad():
        base = model.velocity(model.transformer, *arguments)
        transformer = trained_lora(model)
        trained = model.velocity(transformer, *arguments)
        with reference_policy(transformer):
            reference = model.velocity(transformer, *arguments)
        again = model.velocity(transformer, *arguments)
    assert torch.equal(reference, base)
    assert torch.equal(trained, again)
    assert not torch.allclose(trained, base)


@pytest.mark.parametrize(
    ("name", "warmup", "wanted"),
    [("constant", 0, [1, 1, 1]), ("constant", 2, [0, 0.5, 1]), ("linear", 0, [1, 0.9, 0.8])],
)
def test_learning_rate(model: FlowModel, name: str, warmup: int, wanted: list[float]) -> None:
    optim = OptimConfig(lr=1e-3, lr_scheduler=name, lr_warmup_steps=warmup)
    update, batch = make(model, ActorConfig(ppo_micro_batch_size_per_gpu=4, optim=optim))
    rates = [update.run(batch, 4).compute()["lr"] for _ in range(3)]
    assert rates == pytest.approx([1e-3 * factor for factor in wanted])


def test_state_round_trip_is_bitwise(model: FlowModel, tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, lr_scheduler="linear")
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=4, optim=optim, ema=EMAConfig(update_interval=1)
    )
    update, batch = make(model, actor)
    update.run(batch, 4)
    tensors = {
        stem: {n: t.clone() for n, t in group.items()} for stem, group in update.tensors().items()
    }
    state = update.state()
    update.run(batch, 4)
    wanted = {name: tensor.clone() for name, tensor in update.lora_state().items()}
    fresh = PolicyUpdate(
        FlowPolicy(model, model.transformer),
        actor,
        update._loss,
        Processes(Accelerator(cpu=True)),
        total_updates=10,
    )
    fresh.load(tensors, state)
    fresh.run(batch, 4)
    assert list(lora_parameters(model.transformer)) == list(wanted)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in fresh.lora_state().items())
    assert fresh.state() == update.state()

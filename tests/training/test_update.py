"""The update: gradients of micro-batches or not finite, and the average of the weights."""

import pytest
import torch
from support.modes import make_update

from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig, EMAConfig, OptimConfig
from flowgrpo_rc.training.update import MOST_NONFINITE, NonFiniteGradient


def test_a_gradient_that_is_not_finite_skips_counts_and_ends_the_run(model: FlowModel) -> None:
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=4, optim=OptimConfig(lr=1e-3))
    update, batch = make_update(model, actor)
    poisoned = batch.replace(advantages=torch.full((4, 2), torch.nan))
    before = {name: tensor.clone() for name, tensor in update.lora_state().items()}
    for count in (1, 2):
        metrics = update.run(poisoned, 4).compute()
        assert metrics["nonfinite_updates"] == count
        assert metrics["nonfinite_update_fraction"] == 1
        assert not metrics.keys() & {"grad_norm", "adam_eps_fraction"}
    assert all(torch.equal(before[name], tensor) for name, tensor in update.lora_state().items())
    update.run(batch, 4)  # a good update ends the row of bad ones
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in update.lora_state().items()
    )
    for _ in range(MOST_NONFINITE - 1):
        update.run(poisoned, 4)
    with pytest.raises(NonFiniteGradient, match=r"in a row; lower actor\.optim\.lr"):
        update.run(poisoned, 4)


@pytest.mark.kernels
def test_gradient_equals_one_big_batch(model: FlowModel) -> None:
    """Micro-batches of one step add up to the gradient of the mean over the whole mini-batch."""
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=2, optim=OptimConfig(lr=1e-3, clip_grad=1e9))
    update, batch = make_update(model, actor)
    policy = FlowPolicy(model, model.transformer)
    total = 0.0
    for t in range(2):
        step = policy.transition(batch.step(t))
        x_next = batch.all_latents[:, t + 1]
        ratio = torch.exp(log_prob(step, x_next) - batch.rollout_log_probs[:, t])
        total = total - (batch.advantages[:, t] * ratio).sum() / 8
    wanted = torch.autograd.grad(total, update.parameters, allow_unused=True)
    norm = torch.sqrt(
        sum(gradient.double().pow(2).sum() for gradient in wanted if gradient is not None)
    )
    actual = update.run(batch, 4).compute()
    assert actual["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert actual["pg_loss"] == pytest.approx(0.0, abs=1e-6)
    # At the first step v_hat is the square of the gradient.
    sizes = torch.cat([gradient.flatten() for gradient in wanted if gradient is not None]).abs()
    below = (sizes[sizes > 0] < 1e-8).double().mean().item()
    assert actual["adam_eps_fraction"] == pytest.approx(below, abs=1e-3)


def test_average_and_its_reversal(model: FlowModel) -> None:
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=4, optim=OptimConfig(lr=1e-3), ema=EMAConfig(update_interval=2)
    )
    update, batch = make_update(model, actor)
    values = []
    for _ in range(4):
        update.run(batch, 4)
        values.append({name: tensor.clone() for name, tensor in update.lora_state().items()})
    with update.averaged():
        for name, average in update.lora_state().items():
            # The first average takes the value, the second moves by 1 - 2 / 11.
            first, last = values[1][name], values[3][name]
            torch.testing.assert_close(average, first + (1 - 2 / 11) * (last - first))
    assert all(torch.equal(values[3][name], own) for name, own in update.lora_state().items())

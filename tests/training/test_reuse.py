"""Training again on earlier batches: gradients, old policies, what is not observed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.image_rollouts import KINDS, WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.correction import auto_bands as auto_bands
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.losses.diffusion import DiffusionObjective
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.modes import Mode
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate

CLIP = 1e-3
MODES: dict[str, dict[str, Any]] = {
    "bypass": {"bypass_mode": True},
    "bypass_centered": {"bypass_mode": True, "centered": True},
    "decoupled": {"rollout_is": "token", "rollout_is_threshold": 1.0005},
    "decoupled_centered": {"centered": True},
}


@pytest.fixture
def policy(checkpoint: Path) -> FlowPolicy:
    """A policy in float64, so that a formula and the update agree to many digits."""
    model = load_model(ModelConfig(path=str(checkpoint), dtype="fp64"), torch.device("cpu"))
    return FlowPolicy(model, trained_lora(model))


def sampled(policy: FlowPolicy, kind: str, advantages: list[float]) -> DiffusionBatch:
    """Samples four images with the present weights."""
    spec = make_spec(kind, 1.0, dtype="fp64")
    batch, _ = sample_images(policy.model, policy.network, spec, WINDOWS["first"], keep_means=True)
    column = torch.tensor(advantages, dtype=torch.float64).unsqueeze(1)
    return batch.replace(advantages=column.expand(-1, batch.num_steps))


def moved(policy: FlowPolicy, scale: float, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in lora_parameters(policy.network).values():
        noise = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
        parameter.data.add_(scale * noise)


def update_of(
    policy: FlowPolicy,
    correction: RolloutCorrectionConfig,
    bands: AutoBands | None = None,
    **actor: Any,
) -> tuple[PolicyUpdate, Mode]:
    loss = LossConfig(
        rollout_correction=correction, diffusion_loss=DiffusionLossConfig(clip_ratio=CLIP)
    )
    mode = mode_of(correction, policy, auto_bands=bands)
    optim = OptimConfig(lr=1e-3, clip_grad=1e9)
    update = PolicyUpdate(
        policy,
        ActorConfig(ppo_micro_batch_size_per_gpu=2, optim=optim, **actor),
        DiffusionObjective(loss).terms,
        Processes(Accelerator(cpu=True)),
        mode,
        total_updates=10,
    )
    return update, mode


def credited(policy: FlowPolicy, batch: DiffusionBatch, *, centered: bool) -> Tensor:
    """Log-probs of the present policy, or its centered log-ratio to the rollout, by its formula."""
    columns = []
    for t in range(batch.num_steps):
        step = policy.transition(batch.step(t))
        drawn = batch.all_latents[:, t + 1]
        if centered:
            mean = batch.prev_sample_mean[:, t]
            noise = (drawn - mean) / step.std.reshape(-1, 1, 1, 1)
            distance = (step.mean - mean) / step.std.reshape(-1, 1, 1, 1)
            columns.append((noise * distance).flatten(1).mean(1))
        else:
            columns.append(log_prob(step, drawn))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODES)
def test_each_gradient_is_that_of_a_loss_by_hand(policy: FlowPolicy, kind: str, name: str) -> None:
    """The earlier batch is of other weights; its old policy is that before the first update."""
    correction = RolloutCorrectionConfig(**MODES[name])
    centered = correction.centered
    earlier = sampled(policy, kind, [2.0, -1.0, 0.5, -0.5])
    moved(policy, 1e-2, seed=3)
    new = sampled(policy, kind, [1.0, -1.0, 0.25, -2.0])
    update, mode = update_of(policy, correction)
    with torch.no_grad():
        before = {
            id(batch): (credited(policy, batch, centered=centered), policy.log_probs(batch, 4))
            for batch in (new, earlier)
        }

    taken: list[tuple[list[Tensor], list[Tensor]]] = []

    def note(optimizer: Any, args: Any, options: Any) -> None:
        parameters = update.parameters
        taken.append(
            ([p.detach().clone() for p in parameters], [p.grad.clone() for p in parameters])
        )

    update._optimizer.register_step_pre_hook(note)
    update.run(mode.begin(new, 1), 4, [earlier])

    assert len(taken) == 2
    for (weights, gradients), batch in zip(taken, (new, earlier), strict=True):
        for parameter, value in zip(update.parameters, weights, strict=True):
            parameter.data.copy_(value)
        old, log_probs = before[id(batch)]
        factor = torch.ones_like(old)
        if correction.bypass_mode:
            old = torch.zeros_like(old) if centered else batch.rollout_log_probs
        elif correction.rollout_is:
            factor = torch.exp(log_probs - batch.rollout_log_probs).clamp(max=1.0005)
        ratio = torch.exp(credited(policy, batch, centered=centered) - old)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses = torch.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
        wanted = torch.autograd.grad(
            (losses * factor).mean(), update.parameters, allow_unused=True, materialize_grads=True
        )
        largest = max(float(gradient.abs().max()) for gradient in wanted)
        assert largest > 0
        # The network has a few operations in fp32.
        for gradient, expected in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * largest)
    far = (before[id(earlier)][1] - earlier.rollout_log_probs).abs().max()
    assert far > 1e-5, "the earlier batch is not of other weights"


@pytest.mark.parametrize("bypass", [True, False])
def test_the_decision_of_the_bands_stays(
    policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch, bypass: bool
) -> None:
    """They never see an earlier batch, whose mask is here one that they would not give."""
    monkeypatch.setattr(auto_bands, "WARM_UP", 2)
    correction = RolloutCorrectionConfig(
        bypass_mode=bypass, rollout_rs="token_k1", rollout_rs_threshold="auto:1"
    )
    bands = AutoBands(correction.rules().auto, 5, torch.device("cpu"), num_mini_batches=2)
    new = sampled(policy, "sde", [1.0, -1.0, 0.5, -0.5])
    log_probs = policy.log_probs(new, 4)
    spread = torch.tensor([[-3e-4], [-1e-4], [1e-4], [3e-4]], dtype=torch.float64)
    for updates in range(2):
        past = new.replace(rollout_log_probs=log_probs + spread)
        bands.judge(past, log_probs, None, updates=updates)
    bands.finish(lambda rows: rows)
    new = new.replace(rollout_log_probs=log_probs + 2 * spread)

    update, mode = update_of(policy, correction, bands)
    updated = update.run(mode.begin(new, 1), 2)
    mask = updated.rejection_mask
    assert 0 < mask.sum() < mask.numel()
    mode.finish(updated.metrics)
    scale = [part.clone() for part in bands.scale("token_k1")]

    ready, _ = mode.reuse(new.replace(rejection_mask=~mask))
    assert torch.equal(ready.rejection_mask, ~mask)
    assert all(torch.equal(*pair) for pair in zip(scale, bands.scale("token_k1"), strict=True))


def test_nothing_that_watches_the_mismatch_sees_an_earlier_batch(policy: FlowPolicy) -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True)
    earlier = sampled(policy, "sde", [2.0, -1.0, 0.5, -0.5]).replace(
        seed=torch.tensor([91, 92, 93, 94])
    )
    moved(policy, 1e-2, seed=3)
    new = sampled(policy, "sde", [1.0, -1.0, 0.25, -2.0])
    found = []
    start = [p.detach().clone() for p in lora_parameters(policy.network).values()]
    for batches in ([], [earlier]):
        for parameter, value in zip(lora_parameters(policy.network).values(), start, strict=True):
            parameter.data.copy_(value)
        update, mode = update_of(policy, correction)
        updated = update.run(mode.begin(new, 1), 2, batches)
        seeds = {int(seed) for decision in mode.decisions.take() for seed in decision.seed}
        assert seeds == {11, 12, 13, 14}
        mode.finish(updated.metrics)
        found.append(updated.metrics.compute())
        assert bool(updated.reused.compute()) == bool(batches)
    assert found[0] == found[1]


def test_every_epoch_goes_over_the_new_batch_and_then_the_earlier_ones(
    policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[list[int]] = []
    mini_batch = PolicyUpdate._mini_batch

    def noted(self: PolicyUpdate, mini: DiffusionBatch, metrics: Any) -> Any:
        seeds.append(mini.seed.tolist())
        return mini_batch(self, mini, metrics)

    monkeypatch.setattr(PolicyUpdate, "_mini_batch", noted)
    new = sampled(policy, "sde", [1.0, -1.0, 0.25, -2.0])
    earlier = [new.replace(seed=new.seed + 100), new.replace(seed=new.seed + 200)]
    update, mode = update_of(policy, RolloutCorrectionConfig(bypass_mode=True), ppo_epochs=2)
    update.run(mode.begin(new, 1), 2, earlier)
    halves = [[11, 12], [13, 14]]
    epoch = [[seed + age for seed in half] for age in (0, 100, 200) for half in halves]
    assert seeds == epoch * 2

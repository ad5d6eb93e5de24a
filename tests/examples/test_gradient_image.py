"""The bundled model as a problem of the gradient study."""

from __future__ import annotations

import pytest
import torch
from gradient_image_problem import Images
from gradient_regions import unbounded

from flowgrpo_rc.models.lora import lora_parameters


@pytest.mark.kernels
def test_a_centered_gradient_credits_the_noise_of_the_rollout() -> None:
    images = Images()
    source = torch.Generator().manual_seed(0)
    for name, tensor in lora_parameters(images.network).items():
        if "lora_B" in name:
            tensor.data.copy_(0.02 * torch.randn(tensor.shape, generator=source))
    names = ("bypass_plain_none", "decoupled_centered_none")
    engine = images.engine("int4")
    plain, centered = images.gradients(engine, {name: unbounded()[name] for name in names}, 0)

    batch, rewards = images.rollout(engine, 0)
    groups = rewards.view(-1, 12)
    advantages = (
        (groups - groups.mean(1, keepdim=True)).flatten() / (rewards.std(correction=0) + 1e-4)
    ).float()
    parameters = list(lora_parameters(images.network).values())
    total = torch.zeros(len(plain))
    for t, piece in enumerate(images.policy.pieces(batch)):
        step = images.policy.transition(piece)
        noise = (batch.all_latents[:, t + 1] - batch.prev_sample_mean[:, t]) / step.std
        credit = (noise * step.mean / step.std).flatten(1).mean(1)
        value = -(advantages * credit).sum() / advantages.numel() / batch.num_steps
        parts = torch.autograd.grad(value, parameters)
        total += torch.cat([part.flatten() for part in parts])
    assert (centered - total).norm() < 1e-5 * total.norm()
    assert (plain - total).norm() > 1e-2 * total.norm()

"""`actor.replay=aligned`: batches of the rollout are evaluated in the same batches, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.image_rollouts import make_spec, sample_images, trained_lora

from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.policies.flow import FlowPolicy


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bf16_on_both_sides_agrees_bitwise_in_equal_batches(checkpoint: Path, size: int) -> None:
    """Steps of a micro-batch may be at different timesteps, which in the rollout they are not."""
    model = load_model(ModelConfig(path=str(checkpoint), dtype="bf16"), torch.device("cpu"))
    policy = FlowPolicy(model, trained_lora(model))
    window = [[0, 1, 2], [1, 2, 3], [0, 1, 2], [1, 2, 3]]
    batch, _ = sample_images(
        model, policy.network, make_spec("sde", 4.5, dtype="bf16"), window, chunk=size
    )
    assert torch.equal(policy.log_probs(batch, size), batch.rollout_log_probs)
    found = [
        torch.cat(
            [
                policy.evaluate(piece).log_probs
                for piece in policy.pieces(batch.rows(start, start + size))
            ],
            1,
        )
        for start in range(0, 4, size)
    ]
    assert torch.equal(torch.cat(found).detach(), batch.rollout_log_probs)

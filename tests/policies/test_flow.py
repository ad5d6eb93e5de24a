"""The log-probs that a rollout recorded are those that the training graph computes.

`models/test_conformance.py` asks the same of every model, and compares with stock pipelines.
"""

from __future__ import annotations

import pytest
import torch
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy


@pytest.mark.parametrize(
    ("kind", "guidance", "window"),
    [
        ("sde", 1.0, "first"),
        ("sde", 4.5, "per_sample"),
        ("cps", 4.5, "late"),
        ("dance_sde", 1.0, "all"),
    ],
)
def test_fp32_replay_is_bitwise_exact(
    model: FlowModel, kind: str, guidance: float, window: str
) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec(kind, guidance), WINDOWS[window])
    policy = FlowPolicy(model, transformer)
    replayed = policy.log_probs(batch, 4)
    assert torch.isfinite(replayed).all()
    assert torch.equal(replayed, batch.rollout_log_probs)
    with_gradient = torch.cat(
        [policy.evaluate(batch.step(t)).log_probs for t in range(batch.num_steps)], 1
    )
    assert with_gradient.requires_grad
    assert torch.equal(with_gradient.detach(), batch.rollout_log_probs)


@pytest.mark.kernels
def test_other_micro_batch_shape_differs_by_rounding_only(model: FlowModel) -> None:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 4.5), WINDOWS["all"])
    difference = (
        (FlowPolicy(model, transformer).log_probs(batch, 1) - batch.rollout_log_probs).abs().max()
    )
    assert difference < 1e-6

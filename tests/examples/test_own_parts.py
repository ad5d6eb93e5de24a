"""The example of a user's own loss, and wrong names of such parts."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import diffusion_batch, drawn_log_probs, gradient_of, token_batch

from flowgrpo_rc.algorithms.policy_gradient.images import diffusion_loss
from flowgrpo_rc.algorithms.policy_gradient.text import token_loss
from flowgrpo_rc.cli import main
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig

MODE, STOCK = "actor.diffusion_loss.loss_mode", "StableDiffusion3Pipeline"


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_example_of_a_user_s_loss_has_the_gradient_of_its_formula(kind: str) -> None:
    rollout, old, now, advantages = drawn_log_probs(0.5)
    kept = torch.ones(6, 4, dtype=torch.bool)
    kept[2, 1] = kept[4, 3] = False
    now[2, 1] = math.inf  # broken, and rejected
    fields = {"advantages": advantages, "old_log_probs": old, "rejection_mask": kept}
    correction = RolloutCorrectionConfig()
    if kind == "images":
        own = DiffusionLossConfig(loss_mode="my_loss.Cispo", clip_ratio=0.3)
        config = LossConfig(rollout_correction=correction, diffusion_loss=own)
        low = high = 0.3
        batch = diffusion_batch(rollout, **fields)
        loss = diffusion_loss
        number = kept.numel()
    else:
        own = TokenLossConfig(
            loss_mode="my_loss.CispoTokens", clip_ratio_low=0.2, clip_ratio_high=0.4
        )
        config = LossConfig(rollout_correction=correction, token_loss=own)
        low, high = own.clip_ratio_low, own.clip_ratio_high
        batch = token_batch(rollout, torch.ones_like(kept), **fields)
        loss = token_loss
        number = kept.sum()
    own.validate()
    _, found = gradient_of(lambda leaf: loss(config, leaf, batch)[0], now)
    expected = -advantages * (now - old).exp().clamp(1 - low, 1 + high) / number
    torch.testing.assert_close(found, torch.where(kept, expected, torch.zeros_like(expected)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{MODE}=my_loss.Nope", [MODE, "'Nope'"]),
        (f"{MODE}=my_lost.Cispo", [MODE, "'my_lost'", "PYTHONPATH"]),
        (f"{MODE}=grpo", ["flow_dppo", "my_module.MyLoss"]),
        ("actor.token_loss.loss_mode=ppo", ["actor.token_loss is set", "model.kind=diffusion"]),
        ("model.adapter=my_modell.Chroma", ["model.adapter", "'my_modell'", "PYTHONPATH"]),
        ("model.adapter=flux", [STOCK, "model.adapter=flux is for FluxPipeline"]),
        ("model.adapter=my_model.Chroma", [STOCK, "adapter=my_model.Chroma is for Chroma"]),
    ],
)
def test_wrong_names_say_what_is_allowed(
    override: str, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    command = "train" if override.startswith("actor") else "plan"
    assert main([command, override]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error

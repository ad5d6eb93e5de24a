"""The tutorials take only the core, and their losses are those of the package."""

from __future__ import annotations

import re

import minimal_flow_grpo
import minimal_token_grpo
import pytest
import torch
from support.builders import assert_same, diffusion_batch, drawn_log_probs, gradient_of, token_batch
from support.documented import ROOT
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.images import diffusion_loss
from flowgrpo_rc.algorithms.policy_gradient.text import token_loss
from flowgrpo_rc.correction.api import apply_bypass_mode, apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig

MODES = ("bypass", "decoupled")


@pytest.mark.parametrize("name", ["minimal_flow_grpo", "minimal_token_grpo"])
def test_a_tutorial_is_one_sitting_and_takes_only_the_core(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(source.splitlines()) < 350
    rooms = re.findall(r"^(?:from|import) flowgrpo_rc(?:\.(\w+))?", source, re.MULTILINE)
    assert set(rooms) == {"", "core", "correction", "losses"}
    assert "from flowgrpo_rc import assets\n" in source


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_images_is_that_of_the_package(mode: str) -> None:
    bypass = mode == "bypass"
    tutorial = minimal_flow_grpo
    rollout, old, now, advantages = drawn_log_probs(0.02)  # some steps are clipped, some rejected
    correction = RolloutCorrectionConfig(
        bypass_mode=bypass,
        rollout_is=None if bypass else "token",
        rollout_rs="token_k1",
        rollout_rs_threshold=tutorial.BAND,
    )
    config = LossConfig(
        rollout_correction=correction,
        diffusion_loss=DiffusionLossConfig(clip_ratio=tutorial.CLIP_RATIO),
    )
    batch = diffusion_batch(rollout, advantages=advantages, old_log_probs=old)
    if bypass:
        batch = apply_bypass_mode(batch)
    else:
        batch, _ = apply_rollout_correction_to_batch(batch, correction)
        assert not batch.rejection_mask.all()
    expected = gradient_of(lambda leaf: diffusion_loss(config, leaf, batch)[0], now)
    targets = tutorial.make_targets(rollout, None if bypass else old, advantages)
    assert_same(
        gradient_of(lambda leaf: tutorial.policy_loss(leaf, targets, bypass=bypass)[0], now),
        expected,
    )

    def by_steps(leaf: Tensor) -> Tensor:
        parts = [targets.part(torch.arange(6), t) for t in range(4)]
        losses = [
            tutorial.policy_loss(leaf[:, t : t + 1], parts[t], bypass=bypass)[0] for t in range(4)
        ]
        return torch.stack(losses).sum() / 4

    assert_same(gradient_of(by_steps, now), expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_text_is_that_of_the_package(mode: str) -> None:
    bypass = mode == "bypass"
    tutorial = minimal_token_grpo
    rollout, old, now, advantages = drawn_log_probs(0.5)
    mask = torch.tensor(
        [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    ).bool()
    correction = RolloutCorrectionConfig(
        bypass_mode=bypass,
        rollout_is=None if bypass else "token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold=tutorial.BAND,
    )
    clip = dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), tutorial.CLIP_RATIO)
    config = LossConfig(
        rollout_correction=correction, token_loss=TokenLossConfig(clip_ratio_c=None, **clip)
    )
    batch = token_batch(rollout, mask, advantages=advantages, old_log_probs=old)
    batch = (
        apply_bypass_mode(batch)
        if bypass
        else apply_rollout_correction_to_batch(batch, correction)[0]
    )
    targets = tutorial.make_targets(mask, rollout, None if bypass else old, advantages)
    assert_same(
        gradient_of(lambda leaf: tutorial.policy_loss(leaf, targets, bypass=bypass), now),
        gradient_of(lambda leaf: token_loss(config, leaf, batch)[0], now),
    )

"""The losses of verl-omni: which keys each reads there, and what they are here."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from support.compositions import checked_config
from support.verl_omni_commands import NFT, QWEN_IMAGE

from flowgrpo_rc.config.compose import compose_all, compose_config

OTHER = "actor_rollout_ref."


def test_the_trust_region_of_flow_dppo() -> None:
    """verl-omni reads kl_mask_threshold in place of clip_ratio, and clips no advantage."""
    loss = "actor_rollout_ref.actor.diffusion_loss"
    threshold = [f"{loss}.kl_mask_threshold=3e-5", f"{loss}.add_kl_coefficient=true"]
    assert [row.kind for row in compose_all(threshold).rows] == ["no counterpart"] * 2
    unread = [f"{loss}.clip_ratio=1e-5", f"{loss}.adv_clip_max=5.0"]
    dppo = compose_all([f"{loss}.loss_mode=flow_dppo", *threshold, *unread])
    dppo.check()
    section = checked_config(dppo.config).actor.diffusion_loss
    assert (section.kl_threshold, section.adv_clip_max) == (3e-5, math.inf)
    section.validate()
    own = compose_config([f"{loss}.loss_mode=flow_dppo", "actor.diffusion_loss.adv_clip_max=2"])
    assert own.actor.diffusion_loss.adv_clip_max == 2
    with pytest.raises(ValueError, match="add_kl_coefficient=false"):
        compose_all([f"{loss}.loss_mode=flow_dppo", f"{loss}.add_kl_coefficient=false"]).check()


@pytest.mark.parametrize(
    ("given", "warm_up", "rate", "most", "interval"),
    [
        ("", 0, 0.0, 0.0, 1),
        ("decay_schedule=linear_to_0_5", 0, 0.001, 0.5, 1),
        ("decay_schedule=delayed_linear_to_0_999 update_interval=3", 75, 0.0075, 0.999, 3),
        ("decay_schedule=linear_to_0_5 decay=0.4", 0, 1e9, 0.4, 1),
    ],
)
def test_the_schedules_of_the_old_policy(
    given: str, warm_up: int, rate: float, most: float, interval: int
) -> None:
    """verl-omni counts training steps, the first of which is 1; here a step has 4 updates."""
    own = [f"algorithm.old_policy_{each}" for each in given.split()]
    command = [line for line in NFT if "old_policy" not in line]
    config = checked_config(compose_config([*command, "actor.ppo_mini_batch_size=6", *own]))
    loss: Any = config.actor.diffusion_loss.loss()
    for step in range(1, 700):
        there = 0.0 if step < warm_up else min(rate * (step - warm_up), most)
        there = 1.0 if step % interval else there
        assert loss.old_decay(4 * step) == pytest.approx(there, rel=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        "algorithm.adv_mode=binary",
        "algorithm.timestep_fraction=0.6",
        f"{OTHER}actor.diffusion_loss.adaptive_weight_min=0.001",
        "data.train_max_samples=7199",  # the run draws 7200
        "diffusion/model_engine=veomni_diffusion",
    ],
)
def test_what_stops_a_command_of_diffusion_nft(given: str) -> None:
    with pytest.raises(ValueError, match=rf"would change what is trained: {re.escape(given)} \("):
        compose_config([*NFT, given])


def test_verl_omnis_defaults_hold_with_diffusion_nft() -> None:
    """They are not the defaults here; words of this project come before them."""
    bare = [f"{OTHER}model.algorithm=diffusion_nft", "actor.diffusion_loss.old_decay_max=0.3"]
    own = compose_config(bare).actor.diffusion_loss
    assert (own.loss_mode, own.options) == ("diffusion_nft", {"beta": 0.5, "old_decay_max": 0.3})


@pytest.mark.parametrize(
    ("algorithm", "further", "loss"),
    [
        ("flow_dppo", [], "flow_dppo"),
        ("flow_dppo", QWEN_IMAGE, "flow_dppo"),
        ("flow_dppo", [f"{OTHER}actor.diffusion_loss.loss_mode=grpo_guard"], "grpo_guard"),
        ("grpo_guard", ["actor.diffusion_loss.loss_mode=flow_grpo"], "flow_grpo"),
        ("mix_grpo", [f"{OTHER}actor.diffusion_loss.loss_mode=flow_grpo"], "flow_grpo"),
        ("flow_grpo", [f"{OTHER}actor.policy_loss.loss_mode=grpo_guard"], "grpo_guard"),
    ],
)
def test_the_algorithm_is_the_loss_if_that_is_not_given(
    algorithm: str, further: list[str], loss: str
) -> None:
    config = compose_config([*further, f"{OTHER}model.algorithm={algorithm}"])
    assert config.actor.diffusion_loss.loss_mode == loss
    checked_config(config)

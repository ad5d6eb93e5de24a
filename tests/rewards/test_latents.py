"""Rewards that score the latents that an image is decoded from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager, check_kind, needs_samples

HERE = __name__
IMAGES = np.full((2, 8, 8, 3), 7, np.uint8)
LATENTS = torch.arange(8.0).reshape(2, 2, 2)
PROMPTS = [Prompt(text="a", index=index) for index in range(2)]
LATENT = {"_target_": "function", "path": f"{HERE}:mean", "kind": "latent"}
IMAGE = {"_target_": "function", "path": f"{HERE}:mean", "kind": "image"}


def mean(sample, prompt):
    return float(sample.mean())


def test_each_reward_gets_what_it_scores():
    manager = RewardManager(RewardConfig(terms={"latent": LATENT, "image": IMAGE}))
    rewards = manager.collect([manager.submit(IMAGES, PROMPTS, LATENTS)])
    assert rewards.parts["latent"].tolist() == [1.5, 5.5]
    assert rewards.parts["image"].tolist() == [7.0, 7.0]
    with pytest.raises(ValueError, match="reward 'latent' scores latents, and there are none"):
        manager.submit(IMAGES, PROMPTS)
    with pytest.raises(ValueError, match="3 latents but 2 prompts"):
        manager.submit(IMAGES, PROMPTS, torch.zeros(3, 2))
    manager.close()


def test_latents_alone_are_enough_for_latent_rewards():
    manager = RewardManager(RewardConfig(terms={"latent": LATENT}))
    assert not manager.needs_samples
    assert manager.collect([manager.submit(None, PROMPTS, LATENTS)]).total.tolist() == [1.5, 5.5]
    manager.close()
    assert not needs_samples(RewardConfig(terms={"latent": LATENT}))
    assert needs_samples(RewardConfig(terms={"latent": LATENT, "image": {**IMAGE, "weight": 0.0}}))


def test_a_language_model_has_no_latents():
    with pytest.raises(
        ValueError, match=r"reward\.terms\.latent scores latents, and the model makes texts"
    ):
        check_kind(RewardConfig(terms={"latent": LATENT}), "text")

"""Updates that begin while later rewards are still computed: when they do, and the same bits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prompts import brightness
from support.runs import NFT, Train, final_state

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import PromptSampler, read_prompts
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.update import PolicyUpdate

RC = "algorithm.rollout_correction"
CHUNKS = ("rollout.micro_batch_size_per_gpu=2", "algorithm.adv_estimator=grpo")
RECOMPUTED = (f"{RC}.rollout_is=token", f"{RC}.rollout_is_batch_normalize=true")
MODES = {
    "bypass": (f"{RC}.bypass_mode=true", "rollout.dtype=bf16", f"{RC}.rollout_rs=token_k1"),
    "recomputed": ("algorithm.adv_estimator=rloo", "actor.ppo_epochs=2", *RECOMPUTED),
    "nft": NFT,
}
_held: set[int] = set()  # prompts whose pictures are scored after an update alone
_updated = threading.Event()
_in_time: list[bool] = []


def held_back(sample: np.ndarray, prompt: Prompt) -> float:
    if prompt.index in _held:
        _in_time.append(_updated.wait(timeout=30))
    return brightness(sample, prompt)


def test_the_first_update_does_not_wait_for_the_rewards_of_the_second(
    train: Train, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = read_prompts(prompt_file, require_target=True)
    last = PromptSampler(prompts, 4, seed=42).step(0)[2:]
    monkeypatch.setattr(f"{__name__}._held", {prompt.index for prompt in last})
    one = PolicyUpdate._mini_batch

    def noted(self: PolicyUpdate, *arguments: Any) -> Any:
        found = one(self, *arguments)
        _updated.set()
        return found

    monkeypatch.setattr(PolicyUpdate, "_mini_batch", noted)
    held = f"+reward.terms.held={{_target_: function, path: '{__name__}:held_back'}}"
    settings = ("reward.terms.jpeg=null", held, "trainer.val_before_train=false")
    assert train(*CHUNKS, *settings, "trainer.total_training_steps=1") == 0
    assert len(_in_time) >= 4
    assert all(_in_time)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_mini_batch_waits_for_its_own_groups_and_the_bits_are_the_same(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    settings = (*CHUNKS, *MODES[mode])
    assert train(*settings, f"trainer.output_dir={tmp_path / 'early'}") == 0
    monkeypatch.setattr(AdvantageEstimator, "by_group", False)
    assert train(*settings, f"trainer.output_dir={tmp_path / 'late'}") == 0
    assert final_state(tmp_path / "early") == final_state(tmp_path / "late")

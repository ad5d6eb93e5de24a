"""Checks what a loss of finished samples needs of the settings, and what does not affect it."""

from __future__ import annotations

import copy
import math
from functools import reduce

import pytest
from support.compositions import config_of

from flowgrpo_rc.commands.train import notes
from flowgrpo_rc.config.check_engine import engine_of
from flowgrpo_rc.config.check_settings import check_settings
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.settle import settled
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.rollout.config import AlgoConfig

RC = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def nft() -> Config:
    """The bundled job with DiffusionNFT; not to be changed."""
    return to_config(compose_config(["rollout.dtype=fp32"], config_name="tiny_ocr_nft"))


def test_the_bundled_job(nft: Config) -> None:
    config = nft
    check_settings(config)
    assert config.trained_steps() == 3
    assert config.states_per_sample() == 1
    assert not config.keep_means()
    assert config.why_recompute() is None
    assert config.clip_ratio() is None
    assert config.expected_mismatch() is None
    assert settled(config).algorithm.rollout_correction.centered is False


@pytest.mark.parametrize(
    ("further", "told"),
    [
        ("actor.optim.lr=1e-3", False),  # the default: centered, with an auto clip
        (f"{RC}.centered=false", True),
        ("actor.diffusion_loss.clip_ratio=1e-4", True),
        (f"{RC}.bypass_mode=false", False),  # the mismatch is not in the ratio
    ],
)
def test_a_cached_window_says_what_it_needs(further: str, told: bool) -> None:
    words = ("rollout.dtype=fp32", "rollout.cache.every=2", "rollout.cache.window=true", further)
    said = [
        note for note in notes(settled(config_of(*words))) if "unlearned the bundled task" in note
    ]
    assert len(said) == told


def test_quantized_weights_explain_nothing_of_an_engine_with_full_ones() -> None:
    int4 = ("rollout.dtype=bf16", "model.quantization=int4")
    assert config_of(*int4).expected_mismatch() == config_of(int4[0]).expected_mismatch()
    assert config_of(*int4, "rollout.name=vllm_omni").expected_mismatch() is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rollout.algo.sde_window_size", 3, ["sde_window_size=0", "it is 3"]),
        ("rollout.algo.sde_window_size", None, ["sde_window_size=0", "it is null"]),
        ("rollout.algo.noise_level", 1.0, ["noise_level=1.0", "no step is stochastic", "=0.7"]),
        ("rollout.algo.sde_type", "cps", ["sde_type=cps", "has no effect"]),
        ("rollout.algo.sde_window_range", [0, 5], ["sde_window_range=[0, 5]", "=null"]),
        ("rollout.algo.sde_window_interval", 5, ["sde_window_interval=5", "has no effect"]),
        ("rollout.algo.shared_prefix", True, ["shared_prefix=True", "has no effect"]),
        ("rollout.algo.tail_steps", 4, ["tail_steps=4", "has no effect"]),
        ("actor.diffusion_loss.options", {"times": 11}, ["times=11", "10 noise levels"]),
        ("actor.diffusion_loss.adv_clip_max", math.inf, ["adv_clip_max=inf", "give a number"]),
        ("actor.steps_per_forward", 4, ["steps_per_forward=4", "3 noise levels"]),
        (f"{RC}.bypass_mode", True, [f"{RC}.bypass_mode=True", "knows no log-probs", "=false"]),
        (f"{RC}.rollout_is", "token", [f"{RC}.rollout_is=token", "=null"]),
        (f"{RC}.centered", True, [f"{RC}.centered=True", "no effect"]),
        ("actor.old_log_probs", "recompute", ["old_log_probs=recompute", "=auto"]),
        ("actor.replay", "aligned", ["actor.replay=aligned", "no effect"]),
        ("data.replay_dir", "x", ["data.replay_dir=x", "finished samples"]),
        ("trainer.save_rollouts", True, ["trainer.save_rollouts=true", "finished samples"]),
    ],
)
def test_what_has_no_meaning_is_refused(
    nft: Config, key: str, value: object, words: list[str]
) -> None:
    config = copy.deepcopy(nft)
    *sections, name = key.split(".")
    setattr(reduce(getattr, sections, config), name, value)
    with pytest.raises(ValueError, match=r"=") as error:
        check_settings(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_loss_of_steps_needs_some() -> None:
    config = config_of("rollout.algo.tail_steps=null")
    config.rollout.algo = AlgoConfig(sde_window_size=0)
    with pytest.raises(ValueError, match=r"leaves actor.diffusion_loss.loss_mode=flow_grpo no"):
        check_settings(config)


def test_an_engine_that_records_steps_is_refused(nft: Config) -> None:
    config = copy.deepcopy(nft)
    config.rollout.name = "vllm_omni"
    with pytest.raises(ValueError, match=r"rollout.name=vllm_omni records steps"):
        engine_of(config)

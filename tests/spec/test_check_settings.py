"""Checks what a loss of finished samples needs of the settings, and what does not affect it."""

from __future__ import annotations

import pytest
from support.compositions import checked_config, job, resolved, spec_of

from flowgrpo_rc.commands.train import notes
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.spec.check_engine import check_engine
from flowgrpo_rc.spec.check_settings import check_settings

RC = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def nft() -> Config:
    """The bundled job with DiffusionNFT; not to be changed."""
    return checked_config(compose_config(["rollout.dtype=fp32"], config_name="tiny_ocr_nft"))


def test_the_bundled_job(nft: Config) -> None:
    spec = resolved(nft)
    check_settings(spec)
    assert spec.trained_steps == 3
    assert spec.states_per_sample == 1
    assert not spec.keeps_means
    assert spec.why_recompute is None
    assert spec.clip_ratio is None
    assert spec.expected_mismatch is None
    assert spec.config.algorithm.rollout_correction.centered is False


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
    said = [note for note in notes(spec_of(*words)) if "unlearned the bundled task" in note]
    assert len(said) == told


def test_quantized_weights_explain_nothing_of_an_engine_with_full_ones() -> None:
    int4 = ("rollout.dtype=bf16", "model.quantization=int4")
    assert spec_of(*int4).expected_mismatch == spec_of(int4[0]).expected_mismatch
    assert spec_of(*int4, "rollout.name=vllm_omni").expected_mismatch is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rollout.algo.noise_level", 1.0, ["noise_level=1.0", "no step is stochastic", "=0.7"]),
        ("rollout.algo.sde_type", "cps", ["sde_type=cps", "has no effect"]),
        ("rollout.algo.sde_window_range", [0, 5], ["sde_window_range=[0, 5]", "=null"]),
        ("rollout.algo.sde_window_interval", 5, ["sde_window_interval=5", "has no effect"]),
        ("rollout.algo.shared_prefix", "true", ["shared_prefix=True", "has no effect"]),
        ("rollout.algo.tail_steps", 4, ["tail_steps=4", "has no effect"]),
    ],
)
def test_what_has_no_meaning_is_refused(
    nft: Config, key: str, value: object, words: list[str]
) -> None:
    config = job(f"{key}={value}", of=nft)
    with pytest.raises(ValueError, match=r"=") as error:
        resolved(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_engine_that_records_steps_is_refused(nft: Config) -> None:
    config = job("rollout.name=vllm_omni", of=nft)
    with pytest.raises(ValueError, match=r"rollout.name=vllm_omni records steps"):
        check_engine(resolved(config))

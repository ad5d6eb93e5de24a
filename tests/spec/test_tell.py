"""What is said of a run before its first step, and at the head of its report."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, reduce

import pytest
from support.compositions import resolved

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.spec.tell import ratio, tell

CORRECTION = "algorithm.rollout_correction"
LOSS = "actor.diffusion_loss"


@cache
def composed(name: str) -> Config:
    return to_config(compose_config([], config_name=name))


def spec_of(config_name: str = "tiny_ocr", **sections: dict[str, object]) -> RunSpec:
    """Returns the spec of a bundled configuration with changed values, by section."""
    config = deepcopy(composed(config_name))
    for section, values in sections.items():
        for name, value in values.items():
            setattr(reduce(getattr, section.split("."), config), name, value)
    return resolved(config)


def test_everything_that_a_reader_asks_first_is_told() -> None:
    correction = {"bypass_mode": False, "rollout_is": "token", "rollout_token_veto_threshold": 0.01}
    correction |= {"rollout_rs": "token_k1,step_kl", "rollout_rs_threshold": ["auto:4", 0.1]}
    settings = {
        "model": {"lora_rank": 8, "lora_alpha": 16},
        "rollout": {"dtype": "bf16", "quantization": "int8"},
        "reward": {"terms": {"ocr": {}, "clip": {"weight": 0.5}, "jpeg": None}},
        LOSS: {"clip_ratio": 0.001},
        CORRECTION: correction,
        "trainer": {"seed": 3},
    }
    assert tell(spec_of(**settings), "2 tokens") == {
        "Model": "tiny_glyph_sd3",
        "Reward": "ocr x 1, clip x 0.5",
        "Log-ratio": "centered (its rollout records its means)",
        "Mode": "decoupled (bypass_mode=false), current policy over the recomputed old policy",
        "Loss and clip": "flow_grpo, clip 0.001",
        "Rejection": "token_k1, step_kl auto:4, 0.1; veto 0.01",
        "Weights": "token, bound 2.0",
        "Precision": "rollout bf16 with int8, training fp32",
        "LoRA": "rank 8, alpha 16",
        "First prompt": "2 tokens",
        "Seed": "3",
    }


@pytest.mark.parametrize(
    ("correction", "loss", "name", "value"),
    [
        ({"centered": False}, {}, "Log-ratio", "plain (centered=false)"),
        ({}, {"loss_mode": "grpo_guard"}, "Log-ratio", "centered (GRPO-Guard's own)"),
        ({}, {}, "Mode", "bypass (bypass_mode=true), current policy over the rollout's policy"),
        ({}, {"clip_ratio": "auto:16"}, "Loss and clip", "flow_grpo, clip auto:16"),
        ({"bypass_mode": False}, {}, "Loss and clip", "flow_grpo, clip 0.001 in place of auto:16"),
        (
            {},
            {"loss_mode": "flow_dppo", "kl_threshold": 1e-6, "clip_ratio": 1e-4},
            "Loss and clip",
            "flow_dppo, KL of a step below 1e-06",
        ),
        ({"loss_type": "reinforce"}, {}, "Loss and clip", "reinforce, no clip"),
        ({"rollout_rs": None, "rollout_rs_threshold": None}, {}, "Rejection", "none"),
    ],
)
def test_what_the_ratio_is_and_why(
    correction: dict[str, object], loss: dict[str, object], name: str, value: str
) -> None:
    settings = {
        CORRECTION: {"bypass_mode": True} | correction,
        LOSS: {"clip_ratio": "auto:16"} | loss,
    }
    assert ratio(spec_of(**settings))[name].startswith(value)


def test_of_text() -> None:
    facts = ratio(spec_of("token_grpo", **{"actor.token_loss": {"clip_ratio_high": 0.28}}))
    assert facts["Log-ratio"] == "plain (text has no means)"
    assert facts["Loss and clip"] == "ppo_clip, clip 0.2 below, 0.28 above"


def test_a_loss_of_finished_samples_has_no_ratio() -> None:
    spec = spec_of("tiny_ocr_nft")
    assert ratio(spec) == {}
    facts = tell(spec)
    assert facts["Loss and clip"] == "diffusion_nft, beta 1.0, 3 noise levels of a sample"
    assert not facts.keys() & {"Mode", "Log-ratio", "Rejection"}

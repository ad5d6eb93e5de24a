"""The facts at the top of a page."""

from __future__ import annotations

from typing import Any

import pytest

from flowgrpo_rc.report.facts import facts, ratio
from flowgrpo_rc.report.facts import told as told_before

CONFIG = {
    "model": {"kind": "diffusion", "path": "/home/me/sd3", "dtype": "fp32", "lora_rank": 8},
    "rollout": {"dtype": "bf16", "quantization": "int8"},
    "reward": {"terms": {"ocr": {}, "clip": {"weight": 0.5}, "jpeg": None}},
    "actor": {"diffusion_loss": {"loss_mode": "flow_grpo", "clip_ratio": 0.001}},
    "algorithm": {
        "rollout_correction": {
            "centered": True,
            "rollout_is": "token",
            "rollout_is_mode": None,
            "rollout_is_threshold": 2.0,
            "rollout_rs": "token_k1,step_kl",
            "rollout_rs_threshold": "auto:4,0.1",
            "rollout_token_veto_threshold": 0.01,
        }
    },
    "trainer": {"seed": 3, "mixed_precision": "no"},
}
CONFIG["model"]["lora_alpha"] = 16
ENVIRONMENT = {
    "device": "NVIDIA H100",
    "processes": 2,
    "git": "1234abc-dirty",
    "started": "2026-01-02T03:04+00:00",
    "packages": {"flowgrpo-rc": "0.2.0", "torch": "2.13.0"},
}


def told(config: dict[str, Any], environment: dict[str, Any], metric: str) -> dict[str, str]:
    return {name: value for _, name, value in facts(config, environment, [{metric: 1.0}])}


def test_everything_that_a_reader_asks_first_is_told() -> None:
    assert told(CONFIG, ENVIRONMENT, "rollout_corr/kl") == {
        "Model": "sd3",
        "Reward": "ocr x 1, clip x 0.5",
        "Mode": "decoupled",
        "Loss and clip": "flow_grpo, clip 0.001",
        "Log-ratio": "centered",
        "Rejection": "token_k1, step_kl auto:4, 0.1; veto 0.01",
        "Weights": "token, bound 2.0",
        "Precision": "rollout bf16 with int8, training fp32",
        "LoRA": "rank 8, alpha 16",
        "Seed": "3",
        "Started": "2026-01-02 03:04 UTC",
        "Ran on": "NVIDIA H100, 2 processes",
        "Versions": "flowgrpo-rc 0.2.0, git 1234abc-dirty, torch 2.13.0",
    }


def test_what_is_not_recorded_is_left_out() -> None:
    assert facts({}, {}, []) == []
    found = told({"model": {"path": "org/model"}}, {}, "actor/rollout_corr/kl")
    assert found == {"Model": "org/model", "Mode": "bypass"}


def test_a_text_run_tells_both_sides_of_its_clip() -> None:
    loss = {"loss_mode": "ppo_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    config = {"model": {"kind": "causal_lm"}, "actor": {"token_loss": loss}}
    assert told(config, {}, "step") == {"Loss and clip": "ppo_clip, clip 0.2 below, 0.28 above"}


def test_before_a_run_its_settings_tell_the_mode() -> None:
    lines = told_before(CONFIG, CONFIG, has_mode=True).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["Model", "Reward", "Log-ratio"]
    mode = "decoupled (bypass_mode=false), current policy over the recomputed old policy"
    assert f"  Mode           {mode}" in lines
    assert "  Mode  " not in told_before(CONFIG, CONFIG, has_mode=False)


DECOUPLED, TEXT = {"bypass_mode": False}, {"centered": False, "kind": "causal_lm"}
DPPO = {"loss_mode": "flow_dppo", "kl_threshold": 1e-6}
AUTO = {"centered": None}  # as it is given


@pytest.mark.parametrize(
    ("has", "given", "name", "value"),
    [
        ({}, AUTO, "Log-ratio", "centered (its rollout records its means)"),
        ({"centered": False}, AUTO, "Log-ratio", "plain (its rollout records no means)"),
        ({"centered": False}, {}, "Log-ratio", "plain (centered=false)"),
        (TEXT, AUTO, "Log-ratio", "plain (text has no means)"),
        ({"loss_mode": "grpo_guard"}, AUTO, "Log-ratio", "centered (GRPO-Guard's own)"),
        ({}, {}, "Mode", "bypass (bypass_mode=true), current policy over the rollout's policy"),
        ({}, {}, "Loss and clip", "flow_grpo, clip auto:16"),
        (DECOUPLED | {"clip_ratio": 1e-3}, {}, "Loss and clip", "flow_grpo, clip 0.001 in place"),
        (DPPO, {}, "Loss and clip", "flow_dppo, KL of a step below 1e-06"),
        ({"loss_type": "reinforce"}, {}, "Loss and clip", "reinforce, no clip"),
        (TEXT, {}, "Loss and clip", "ppo_clip, clip 0.2 below, 0.3 above"),
        ({}, {}, "Rejection", "none"),
    ],
)
def test_what_the_ratio_is_and_why(
    has: dict[str, Any], given: dict[str, Any], name: str, value: str
) -> None:
    def tree(changed: dict[str, Any], clip: Any) -> dict[str, Any]:
        own = {"bypass_mode": True, "centered": True, "loss_mode": "flow_grpo"} | changed
        tokens = {"loss_mode": "ppo_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
        actor = {"diffusion_loss": own | {"clip_ratio": clip}, "token_loss": tokens}
        return {"model": own, "actor": actor, "algorithm": {"rollout_correction": own}}

    found = ratio(tree(has, has.get("clip_ratio", "auto:16")), tree(has | given, "auto:16"))
    assert found[name].startswith(value)

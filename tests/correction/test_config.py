"""RolloutCorrectionConfig: wrong values, contradictions, settings of the documents, its fields."""

import math

import pytest

from flowgrpo_rc.correction.config import RolloutCorrectionConfig

BYPASS = {"bypass_mode": True}
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
BANDS = {"rollout_rs": ["token_k1", "seq_max_k3"], "rollout_rs_threshold": ["0.5_2.0", 0.1]}
SCALE_FREE = {"rollout_rs": "token_k1,step_kl", "rollout_rs_threshold": ["auto:4", 1e-5]}
NORMALISED = {"rollout_is_batch_normalize": True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": "ppo"}, ["loss_type", "ppo_clip", "reinforce"]),
        ({"rollout_is": "tokens"}, ["rollout_is", "null", "token", "sequence", "geometric"]),
        ({"rollout_is": "token", "rollout_is_mode": "tis"}, ["rollout_is_mode", "truncate"]),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, ["rollout_is_threshold"]),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, ["rollout_is_threshold"]),
        ({"bypass_level": "windows", "bypass_mode": True}, ["bypass_level", "step, window"]),
        ({"normalize": "mean"}, ["normalize", "null", "all", "kept"]),
        ({"log_prob_scale": "total"}, ["log_prob_scale", "mean", "sum"]),
        ({"metric_names": "slimes"}, ["metric_names", "verl", "slime", "both"]),
        ({"rollout_token_veto_threshold": 0.0}, ["rollout_token_veto_threshold", "1e-4"]),
        ({"rollout_token_veto_threshold": 1.0}, ["rollout_token_veto_threshold"]),
        ({"rollout_token_veto_threshold": math.nan}, ["rollout_token_veto_threshold"]),
        ({"rollout_rs": "token_k1"}, ["rollout_rs", "rollout_rs_threshold"]),
        # Contradictions name both keys.
        ({"loss_type": "reinforce"}, ["loss_type", "bypass_mode"]),
        ({"bypass_level": "window"}, ["bypass_level", "bypass_mode"]),
        (BYPASS | {"exclude_rejected": True}, ["exclude_rejected", "bypass_mode"]),
        (NORMALISED, ["rollout_is_batch_normalize", "rollout_is "]),
        ({"rollout_is_mode": "clip"}, ["rollout_is_mode", "rollout_is "]),
        ({"log_prob_scale": "sum"}, ["log_prob_scale", "rollout_is"]),
        ({"log_prob_scale": "sum"} | SCALE_FREE, ["log_prob_scale", "rollout_is"]),
        (
            BYPASS | NORMALISED | {"rollout_is": "token"},
            ["rollout_is_batch_normalize", "bypass_mode"],
        ),
        (
            BYPASS | {"rollout_is_mode": "mask", "rollout_is": "token"},
            ["rollout_is_mode", "bypass_mode"],
        ),
        ({"rollout_rs_threshold": "0.5_2.0"}, ["rollout_rs_threshold", "rollout_rs:"]),
        ({"rollout_rs_threshold_lower": 0.5}, ["rollout_rs_threshold_lower", "rollout_rs:"]),
    ],
)
def test_what_is_refused_names_the_keys_and_what_is_allowed(settings, words):
    with pytest.raises(ValueError, match=rf"algorithm\.rollout_correction\.{words[0]}") as error:
        RolloutCorrectionConfig(**settings).validate()
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BANDS,
        BYPASS | BANDS | {"rollout_is": "sequence"},
        BYPASS | {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        REINFORCE | {"rollout_is_mode": "mask"},
        REINFORCE | NORMALISED,
        REINFORCE | {"exclude_rejected": False},
        NORMALISED | {"rollout_is": "geometric", "normalize": "kept", "metric_names": "both"},
        {"rollout_is": "token", "rollout_rs": "geometric", "rollout_token_veto_threshold": 1e-6},
        {"custom_correction": "support.builders:drop_odd"},
    ],
)
def test_settings_of_the_documents_are_valid(settings):
    RolloutCorrectionConfig(**settings).validate()


def test_rejected_samples_leave_the_baseline_in_decoupled_mode_unless_switched_off():
    decoupled = {None: True, True: True, False: False}
    for bypass, expect in ((False, decoupled), (True, {None: False, False: False})):
        for given, excludes in expect.items():
            config = RolloutCorrectionConfig(bypass_mode=bypass, exclude_rejected=given)
            assert config.excludes_rejected is excludes

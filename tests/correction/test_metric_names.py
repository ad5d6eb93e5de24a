"""The metrics under the names of slime."""

from __future__ import annotations

import pytest
from support.builders import (
    expected,
    log_probs,
    mask_of,
    rule_of,
    settings,
)
from support.oracles import MODES

from flowgrpo_rc import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("metric_names", ["slime", "both"])
def test_slime_names(mode, metric_names):
    training, rollout = log_probs()
    rule = rule_of("geometric", mode, veto=0.4, normalise=True)
    config = RolloutCorrectionConfig(**settings(rule), metric_names=metric_names)
    verl = expected(training, rollout, mask_of("right"), rule).metrics
    documented = {
        "mismatch_training_log_ppl": "training_log_ppl",
        "mismatch_training_ppl": "training_ppl",
        "mismatch_rollout_log_ppl": "rollout_log_ppl",
        "mismatch_rollout_ppl": "rollout_ppl",
        "mismatch_kl": "kl",
        "mismatch_k3_kl": "k3_kl",
        "mismatch_log_ppl_diff": "log_ppl_diff",
        "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
        "mismatch_ppl_ratio": "ppl_ratio",
        "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
        "mis_mean_is_weight_before_clip": "rollout_is_raw_mean",
        "mis_ratio_mean_after_mis": "rollout_is_mean",
        "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
        "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
        "mis_batch_norm_factor": "rollout_is_batch_norm_factor",
    }
    high = "rollout_is_ratio_fraction_high"
    low = "rollout_is_ratio_fraction_low"
    documented |= {
        "truncate": {"mis_truncate_fraction": high},
        "clip": {"mis_clip_fraction_low": low, "mis_clip_fraction_high": high},
        "mask": {"mis_mask_fraction_low": low, "mis_mask_fraction_high": high},
        "icepop": {},
    }[mode]
    renamed = {new: verl[old] for new, old in documented.items()}
    left = (
        verl
        if metric_names == "both"
        else {n: v for n, v in verl.items() if n not in documented.values()}
    )
    found = Corrector(config)(training, rollout, mask_of("right")).metrics.compute()
    assert found == pytest.approx(left | renamed, rel=1e-10, abs=1e-12)

"""The metrics under the names of slime."""

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
        "mismatch_k3_kl": "k3_kl",
        "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
        "mis_ratio_mean_after_mis": "rollout_is_mean",
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
    actual = Corrector(config)(training, rollout, mask_of("right")).metrics.compute()
    for new, old in documented.items():
        assert actual[new] == pytest.approx(verl[old], rel=1e-10, abs=1e-12)
        assert (old in actual) == (metric_names == "both")

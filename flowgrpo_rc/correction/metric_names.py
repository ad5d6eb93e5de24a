"""slime's names of verl's metrics."""

from flowgrpo_rc.core.metrics import MetricBag

SLIME_NAMES = {
    "training_log_ppl": "mismatch_training_log_ppl",
    "training_ppl": "mismatch_training_ppl",
    "rollout_log_ppl": "mismatch_rollout_log_ppl",
    "rollout_ppl": "mismatch_rollout_ppl",
    "kl": "mismatch_kl",
    "k3_kl": "mismatch_k3_kl",
    "log_ppl_diff": "mismatch_log_ppl_diff",
    "log_ppl_abs_diff": "mismatch_log_ppl_abs_diff",
    "ppl_ratio": "mismatch_ppl_ratio",
    "logprob_abs_diff_mean": "train_rollout_logprob_abs_diff",
    "rollout_is_raw_mean": "mis_mean_is_weight_before_clip",
    "rollout_is_mean": "mis_ratio_mean_after_mis",
    "rollout_is_catastrophic_token_fraction": "mis_catastrophic_token_fraction",
    "rollout_is_veto_fraction": "mis_catastrophic_seq_fraction",
    "rollout_is_batch_norm_factor": "mis_batch_norm_factor",
}
# slime names the fractions beyond the bounds after what the mode does there.
SLIME_FRACTIONS = {
    "truncate": {"rollout_is_ratio_fraction_high": "mis_truncate_fraction"},
    "clip": {
        "rollout_is_ratio_fraction_low": "mis_clip_fraction_low",
        "rollout_is_ratio_fraction_high": "mis_clip_fraction_high",
    },
    "mask": {
        "rollout_is_ratio_fraction_low": "mis_mask_fraction_low",
        "rollout_is_ratio_fraction_high": "mis_mask_fraction_high",
    },
    "icepop": {},
}


def apply_names(metrics: MetricBag, metric_names: str, mode: str) -> None:
    """Renames metrics in place, which come under verl's names, without prefix.

    `verl` keeps the names, `slime` replaces those that slime has, `both` adds slime's. `mode` is
    one of `thresholds.IS_MODES`.
    """
    if metric_names != "verl":
        metrics.rename(SLIME_NAMES | SLIME_FRACTIONS[mode], keep=metric_names == "both")


def other_names(name: str) -> tuple[str, ...]:
    """Returns the names under which a metric may be reported, verl's first, without prefix."""
    tables = (SLIME_NAMES, *SLIME_FRACTIONS.values())
    return (name, *(table[name] for table in tables if name in table))

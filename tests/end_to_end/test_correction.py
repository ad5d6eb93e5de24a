"""Runs with each part of the rollout correction."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from metric_names import find
from support.runs import Train, Trained, read_rows

from flowgrpo_rc.config.tree import stored_config

ONE_STEP = "trainer.total_training_steps=1"
RC = "algorithm.rollout_correction"
CLIP_RATIO = 1e-5
MOVED = (
    "rollout.dtype=bf16",
    "actor.optim.lr=0.1",
    f"actor.diffusion_loss.clip_ratio={CLIP_RATIO}",
)
MODES = {
    "bypass": (
        *MOVED,
        f"{RC}.bypass_mode=true",
        f"{RC}.rollout_is=sequence",
        f"{RC}.metric_names=both",
        f"{RC}.rollout_rs=[token_k1,step_kl]",
        f"{RC}.rollout_rs_threshold=auto:4",
    ),
    "decoupled": MOVED,
}
STEP_KL_RULES = [f"{RC}.rollout_rs=step_kl", f"{RC}.rollout_rs_threshold=1e-9"]
BF16 = ["model.dtype=bf16", "rollout.dtype=bf16", f"{RC}=decoupled_token_is", "actor.optim.lr=1e-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "bypass"),
    [("grpo_guard", True), ("flow_dppo", False)],
)
def test_a_run_with_a_loss_that_needs_means(trained: Trained, mode: str, bypass: bool) -> None:
    """In decoupled mode the anchor is recomputed, and the first update has not moved from it.

    In bypass mode it is the bf16 rollout.
    """
    options = [f"actor.diffusion_loss.loss_mode={mode}", f"{RC}.bypass_mode={bypass}"]
    options += ["rollout.dtype=bf16", "actor.ppo_mini_batch_size=4", "actor.ema.enable=false"]
    row = read_rows(trained(*options, ONE_STEP))[-1]
    assert math.isfinite(row["actor/pg_loss"])
    if bypass:
        assert row["actor/step_kl_max"] > 0
    else:
        assert row["actor/step_kl_max"] == row["actor/ratio_std"] == 0
        assert row["actor/ratio_mean"] == 1


@pytest.mark.slow
def test_a_run_records_means_and_a_replay_is_centered_by_them(
    train: Train, trained: Trained, tmp_path: Path
) -> None:
    """An fp32 rollout in the same batch shape has a KL of exactly 0 until the policy moves."""
    saved = trained(*STEP_KL_RULES, "trainer.save_rollouts=true", ONE_STEP)
    assert read_rows(saved)[-1]["rollout_corr/rollout_rs_step_kl_max"] == 0
    assert train(*STEP_KL_RULES, f"data.replay_dir={saved}", ONE_STEP) == 0
    config = stored_config(tmp_path / "run" / "config.yaml")
    assert config.algorithm.rollout_correction.centered


@pytest.mark.slow
def test_a_replay_without_means_is_not_centered(
    train: Train, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    saved = trained(f"{RC}.centered=false", "trainer.save_rollouts=true", ONE_STEP)
    capsys.readouterr()
    replay = f"data.replay_dir={saved}"
    assert train(replay, ONE_STEP) == 0
    assert "records no means" in capsys.readouterr().out
    config = stored_config(tmp_path / "run" / "config.yaml")
    assert not config.algorithm.rollout_correction.centered
    refused = tmp_path / "refused"
    assert train(replay, *STEP_KL_RULES, f"trainer.output_dir={refused}") != 0
    assert "prev_sample_mean" in capsys.readouterr().err
    assert not (refused / "metrics.jsonl").exists()


@pytest.mark.slow
def test_equal_precisions_and_sizes_have_no_mismatch(trained: Trained) -> None:
    rows = read_rows(trained(*BF16))[1:]
    for row in rows:
        assert row["rollout_corr/logprob_abs_diff_max"] == 0
        assert row["rollout_corr/rollout_is_min"] == row["rollout_corr/rollout_is_max"] == 1


@pytest.mark.slow
def test_a_run_says_why_it_recomputes(train: Train, capsys: pytest.CaptureFixture) -> None:
    short = (ONE_STEP, "trainer.test_freq=-1", "trainer.val_before_train=false")
    assert train(*BF16, *short, f"{RC}.rollout_is_batch_normalize=true") == 0
    said = capsys.readouterr().out
    assert "old log-probs are recomputed" in said
    assert "rollout_is_batch_normalize takes the mean weight of the whole batch" in said


@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_a_run_reports_its_mismatch(trained: Trained, mode: str) -> None:
    """The first mini-batch has half of the samples.

    The learning rate moves the policy far beyond the mismatch; the band is a part of the mismatch.
    """
    run = trained(*MODES[mode])
    prefix = "actor/rollout_corr/" if mode == "bypass" else "rollout_corr/"
    for row in read_rows(run)[1:]:
        own = {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
        median, p99, most = (own[f"logprob_abs_diff_{part}"] for part in ("p50", "p99", "max"))
        assert 0 < median < p99 <= most < 1e-3 < own["policy_drift_abs_mean"]
        assert own["mismatch_over_clip"] == pytest.approx(median / CLIP_RATIO)
        assert (own["pre_update_clip_fraction"] == 0) == (mode == "decoupled")
        assert 0.3 < own["mismatch_over_expected"] < 2.0
    assert not (run / "health.jsonl").exists()


def unknown_metrics(run: Path) -> list[str]:
    """Returns the metrics of a run that docs/metrics.md does not explain."""
    names = {name for row in read_rows(run) for name in row} - {"step"}
    assert len(names) > 60
    return sorted(name for name in names if find(name) is None)


def test_the_page_explains_every_metric_of_a_run_in_bypass_mode(trained: Trained) -> None:
    assert unknown_metrics(trained(*MODES["bypass"])) == []


def test_the_page_explains_every_metric_of_a_run_in_decoupled_mode(
    train_text: Train, tmp_path: Path
) -> None:
    settings = (f"{RC}=decoupled_seq_is_rs", f"{RC}.metric_names=both", "rollout.staleness=1")
    assert train_text(*settings, "actor.use_kl_loss=true") == 0
    assert unknown_metrics(tmp_path / "run") == []


@pytest.mark.slow
def test_a_run_in_bf16_says_that_it_cannot_expect_the_rounding_of_an_fp32_rollout(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["model.dtype=bf16", "rollout.dtype=fp32", f"{RC}.bypass_mode=true"]
    assert train(*options, ONE_STEP, "actor.ema.enable=false") == 0
    assert "actor/rollout_corr/mismatch_over_expected" not in read_rows(tmp_path / "run")[-1]
    assert "no fault of the engine is reported" in capsys.readouterr().out

"""Runs with each part of the rollout correction."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.marks import slow
from support.runs import Train, Trained, read_rows, stopped_and_whole

from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.correction import auto_bands
from flowgrpo_rc.correction.auto_bands import LEAST_SPREAD

ONE_STEP = "trainer.total_training_steps=1"
RC = "algorithm.rollout_correction"
AUTO_RULES = [f"{RC}.rollout_rs=[token_k1,step_kl]", f"{RC}.rollout_rs_threshold=auto:4"]
STEP_KL_RULES = [f"{RC}.rollout_rs=step_kl", f"{RC}.rollout_rs_threshold=1e-9"]
BF16 = ["model.dtype=bf16", "rollout.dtype=bf16", f"{RC}=decoupled_token_is", "actor.optim.lr=1e-2"]


@pytest.mark.parametrize(
    ("mode", "bypass"),
    [
        ("grpo_guard", True),
        ("flow_dppo", False),
        slow("grpo_guard", False),
        slow("flow_dppo", True),
    ],
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


@pytest.mark.parametrize(
    ("bypass", "further"),
    [slow(False, [f"{RC}.exclude_rejected=false"]), (True, [])],
    ids=["own_forwards", "bypass"],
)
def test_a_resumed_run_goes_on_with_its_bands(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bypass: bool, further: list[str]
) -> None:
    monkeypatch.setattr(auto_bands, "WARM_UP", 2)
    options = [*AUTO_RULES, *further, f"{RC}.bypass_mode={bypass}", "rollout.dtype=bf16"]
    whole = read_rows(stopped_and_whole(train, tmp_path, *options))
    prefix = "actor/rollout_corr/rollout_rs" if bypass else "rollout_corr/rollout_rs"
    assert f"{prefix}_token_k1_auto_spread" not in whole[1]
    assert whole[2][f"{prefix}_token_k1_auto_spread"] > LEAST_SPREAD
    assert 0 < whole[2][f"{prefix}_step_kl_auto_warm_fraction"] <= 1


@pytest.mark.parametrize("bypass", [slow(False), True])
def test_a_run_records_means_and_judges_them(train: Train, tmp_path: Path, bypass: bool) -> None:
    """An fp32 rollout in the same batch shape has a KL of exactly 0 until the policy moves."""
    options = [*STEP_KL_RULES, f"{RC}.bypass_mode={bypass}", ONE_STEP]
    options.append("rollout.micro_batch_size_per_gpu=2")
    assert train(*options, "trainer.save_rollouts=true") == 0
    prefix = "actor/rollout_corr" if bypass else "rollout_corr"
    row = read_rows(tmp_path / "run")[-1]
    largest = row[f"{prefix}/rollout_rs_step_kl_max"]
    assert largest > 0 if bypass else largest == 0
    replay = [f"data.replay_dir={tmp_path / 'run'}", f"trainer.output_dir={tmp_path / 'replay'}"]
    assert train(*options, *replay) == 0


@pytest.mark.parametrize("kept", [False, slow(True)])
def test_a_replay_is_centered_if_it_has_means(
    train: Train, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture, kept: bool
) -> None:
    saved = trained(f"{RC}.centered={kept}", "trainer.save_rollouts=true", ONE_STEP)
    capsys.readouterr()
    replay = f"data.replay_dir={saved}"
    assert train(replay, ONE_STEP) == 0
    assert ("records no means" in capsys.readouterr().out) is not kept
    config = stored_config(tmp_path / "run" / "config.yaml")
    assert config.algorithm.rollout_correction.centered is kept
    if not kept:
        refused = tmp_path / "refused"
        assert train(replay, *STEP_KL_RULES, f"trainer.output_dir={refused}") != 0
        assert "prev_sample_mean" in capsys.readouterr().err
        assert not (refused / "metrics.jsonl").exists()


def test_equal_precisions_and_sizes_have_no_mismatch(trained: Trained) -> None:
    rows = read_rows(trained(*BF16))[1:]
    for row in rows:
        assert row["rollout_corr/logprob_abs_diff_max"] == 0
        assert row["rollout_corr/rollout_is_min"] == row["rollout_corr/rollout_is_max"] == 1


def test_a_run_says_why_it_recomputes(train: Train, capsys: pytest.CaptureFixture) -> None:
    assert train(*BF16, ONE_STEP, f"{RC}.rollout_is_batch_normalize=true") == 0
    said = capsys.readouterr().out
    assert "old log-probs are recomputed" in said
    assert "rollout_is_batch_normalize takes the mean weight of the whole batch" in said


@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_a_run_reports_its_mismatch(trained: Trained, mode: str) -> None:
    """The first mini-batch has half of the samples.

    The learning rate moves the policy far beyond the mismatch; the band is a part of the mismatch.
    """
    clip_ratio = 1e-5
    options = [f"{RC}.bypass_mode={mode == 'bypass'}", "rollout.dtype=bf16", "actor.optim.lr=0.1"]
    run = trained(*options, f"actor.diffusion_loss.clip_ratio={clip_ratio}")
    prefix = "actor/rollout_corr/" if mode == "bypass" else "rollout_corr/"
    for row in read_rows(run)[1:]:
        own = {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
        median, p99, most = (own[f"logprob_abs_diff_{part}"] for part in ("p50", "p99", "max"))
        assert 0 < median < p99 <= most < 1e-3 < own["policy_drift_abs_mean"]
        assert own["mismatch_over_clip"] == pytest.approx(median / clip_ratio)
        assert (own["pre_update_clip_fraction"] == 0) == (mode == "decoupled")
        assert 0.3 < own["mismatch_over_expected"] < 2.0
    assert not (run / "health.jsonl").exists()


@pytest.mark.parametrize("rollout", ["bf16", slow("fp32")])
def test_a_run_in_bf16_expects_its_rounding_or_says_that_it_cannot(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture, rollout: str
) -> None:
    options = ["model.dtype=bf16", f"rollout.dtype={rollout}", f"{RC}.bypass_mode=true"]
    assert train(*options, ONE_STEP, "actor.ema.enable=false") == 0
    row = read_rows(tmp_path / "run")[-1]
    said = capsys.readouterr().out
    assert ("actor/rollout_corr/mismatch_over_expected" in row) == (rollout == "bf16")
    assert ("no fault of the engine is reported" in said) == (rollout == "fp32")

"""Training a language model: what a run writes, corrects, resumes, replays and learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import fingerprint, read_rows, without_timings

from flowgrpo_rc.cli import main
from flowgrpo_rc.records.rollout_files import load_rollout

RC = "algorithm.rollout_correction"
SMALL = (
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "rollout.micro_batch_size_per_gpu=null",
    "rollout.val_kwargs.n=16",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
)


def train(folder: Path, *further: str) -> int:
    return main(
        ["train", "--config-name", "token_grpo", *SMALL, f"trainer.output_dir={folder}", *further]
    )


def lora(folder: Path) -> str:
    return fingerprint(load_file(folder / "lora" / "adapter_model.safetensors"))


def test_a_run_leaves_what_an_image_run_leaves(tmp_path: Path) -> None:
    assert train(tmp_path) == 0
    expected = {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "lora",
        "report.html",
    }
    assert expected <= {path.name for path in tmp_path.iterdir()}
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"val/reward", "val/exact_match"} <= rows[0].keys()
    assert {"actor/grad_norm", "actor/pg_loss", "response/length_mean", "zero_std_ratio"} <= rows[
        1
    ].keys()
    assert not any(key.startswith("actor/rollout_corr") for key in rows[1])
    samples = [
        json.loads(line)
        for line in (tmp_path / "samples" / "step_000002.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 16
    assert samples[0].keys() == {"prompt", "target", "completion", "score"}
    assert samples[0]["prompt"] in (tmp_path / "report.html").read_text()


@pytest.mark.kernels
def test_the_mismatch_of_a_bf16_rollout_shows_and_that_of_an_fp32_rollout_is_rounding(
    tmp_path: Path,
) -> None:
    means = {}
    for dtype in ("fp32", "bf16"):
        assert train(tmp_path / dtype, f"rollout.dtype={dtype}") == 0
        means[dtype] = read_rows(tmp_path / dtype)[1]["rollout_corr/logprob_abs_diff_mean"]
    assert means["fp32"] < 1e-6
    assert 1e-4 < means["bf16"] < 2e-2


EIGHT_STEPS = ("trainer.total_training_steps=8", "trainer.test_freq=8")


def test_a_healthy_small_run_has_no_warnings(tmp_path: Path) -> None:
    """A step has 60 tokens, which cannot tell a fault from a few unlikely tokens."""
    assert train(tmp_path, *EIGHT_STEPS) == 0
    assert read_rows(tmp_path)[-1]["step"] == 8
    assert not (tmp_path / "health.jsonl").exists()


def test_an_engine_with_coarse_weights_is_reported_in_a_small_run(tmp_path: Path) -> None:
    larger = ("data.train_batch_size=16", "rollout.n=8", "trainer.total_training_steps=6")
    engine = "rollout.name=support.faulty_engines.CoarseTextWeights"
    assert train(tmp_path, *larger, engine) == 0
    (warning,) = (tmp_path / "health.jsonl").read_text().splitlines()
    assert "mismatch_over_expected" in warning


SETTINGS = {
    "pg": (f"{RC}=bypass_pg_geo_rs_token_tis", "model.gradient_checkpointing=true"),
    "normalized": (
        f"{RC}=pg_is",
        f"{RC}.rollout_is_batch_normalize=true",
    ),
    "rloo": (f"{RC}=decoupled_k3_rs_seq_tis", "algorithm.adv_estimator=rloo", "actor.ppo_epochs=2"),
    "veto": (f"{RC}=slime_mis_veto", f"{RC}.metric_names=both", "rollout.temperature=1.5"),
    "gspo": (
        "actor.token_loss.loss_mode=gspo",
        "actor.token_loss.loss_agg_mode=seq-mean-token-mean",
    ),
    "dr_grpo": (
        "algorithm.adv_estimator=dr_grpo",
        "actor.token_loss.loss_agg_mode=seq-mean-token-sum",
        "actor.use_kl_loss=true",
        "actor.ema.enable=true",
        "actor.ema.update_interval=1",
    ),
    "slime": (
        f"{RC}.use_tis=true",
        f"{RC}.tis_level=geometric",
        f"{RC}.tis_mode=clip",
        f"{RC}.metric_names=slime",
        "rollout.response_length=1",
    ),
}


@pytest.mark.parametrize("further", SETTINGS.values(), ids=SETTINGS)
def test_settings_train(tmp_path: Path, further: tuple[str, ...]) -> None:
    assert train(tmp_path, *further) == 0
    for row in read_rows(tmp_path)[1:]:
        assert all(value is not None and math.isfinite(value) for value in row.values())
    if "rollout.response_length=1" in further:
        assert read_rows(tmp_path)[1]["response/limit_fraction"] > 0


@pytest.mark.parametrize("mode", ["seq_is", "pg_is"])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, mode: str) -> None:
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    assert train(whole, f"{RC}={mode}", "trainer.total_training_steps=4") == 0
    assert train(cut, f"{RC}={mode}", "trainer.total_training_steps=2") == 0
    assert train(cut, f"{RC}={mode}", "trainer.total_training_steps=4") == 0
    assert lora(whole) == lora(cut)
    assert without_timings(read_rows(whole))[3:] == without_timings(read_rows(cut))[3:]


def test_saved_rollouts_train_another_run_with_their_own_log_probs(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "source"
    replayed = tmp_path / "replayed"
    assert train(source, "trainer.save_rollouts=true") == 0
    files = sorted((source / "rollouts").iterdir())
    assert [path.name for path in files] == [
        f"step_{step:06d}_process_0_of_1.safetensors" for step in (1, 2)
    ]
    replay = (f"data.replay_dir={source}", "actor.optim.lr=3e-3", "trainer.total_training_steps=4")
    assert train(replayed, *replay) == 0
    there = read_rows(source)
    here = read_rows(replayed)
    assert here[1]["reward/mean"] == there[1]["reward/mean"]
    # The first step is the same policy on the same data; the third sees data of a policy that is
    # two steps old.
    assert here[1]["rollout_corr/rollout_log_ppl"] == there[1]["rollout_corr/rollout_log_ppl"]
    assert here[3]["rollout_corr/rollout_log_ppl"] == there[1]["rollout_corr/rollout_log_ppl"]
    assert (
        here[3]["rollout_corr/logprob_abs_diff_mean"]
        > 3 * there[1]["rollout_corr/logprob_abs_diff_mean"]
    )
    batch, rewards, _ = load_rollout(files[0], torch.device("cpu"))
    assert len(batch) == len(rewards.total) == 16
    capsys.readouterr()
    for further, words in (
        (("rollout.temperature=0.5",), ("temperature", "replay_dir")),
        (("rollout.n=2",), ("rollout.n", "groups")),
        ((f"data.replay_dir={tmp_path}",), ("save_rollouts",)),
        (("rollout.response_length=7",), ("response_length", "8 there, 7 here")),
    ):
        assert train(tmp_path / "refused", *replay[:1], *further) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-100])
    assert train(tmp_path / "damaged", *replay) == 2
    assert "cannot be read" in capsys.readouterr().err
    files[1].write_bytes(content)
    files[0].rename(files[0].with_name("step_000001_process_0_of_2.safetensors"))
    assert train(tmp_path / "incomplete", *replay, "--dry-run") == 2
    assert "steps 1 to 2" in capsys.readouterr().err


def test_rollouts_are_reproducible_and_those_after_the_checkpoint_are_deleted(
    tmp_path: Path,
) -> None:
    saving = ("trainer.save_rollouts=true", "trainer.total_training_steps=1")
    for name in ("a", "b"):
        leftover = tmp_path / name / "rollouts" / "step_000007_process_0_of_1.safetensors"
        leftover.parent.mkdir(parents=True)
        leftover.touch()
        assert train(tmp_path / name, *saving) == 0
    files = [sorted((tmp_path / name / "rollouts").iterdir()) for name in ("a", "b")]
    assert [path.name for path in files[0]] == ["step_000001_process_0_of_1.safetensors"]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def test_wholly_rejected_samples_leave_the_baseline(tmp_path: Path) -> None:
    reject_much = (f"{RC}.rollout_rs=seq_max_k2", f"{RC}.rollout_rs_threshold=1e-6")
    rows = {}
    for name, further in (("on", ()), ("off", (f"{RC}.exclude_rejected=false",))):
        assert train(tmp_path / name, *reject_much, *further) == 0
        rows[name] = read_rows(tmp_path / name)[1]
    excluded = rows["on"]["rollout_corr/excluded_fraction"]
    assert 0 < excluded < 1
    assert excluded == rows["on"]["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert "rollout_corr/excluded_fraction" not in rows["off"]
    assert rows["on"]["advantages/std"] != rows["off"]["advantages/std"]


def test_it_learns(tmp_path: Path) -> None:
    """Twenty steps at the shipped settings. The whole run is in the README."""
    further = [
        "trainer.total_training_steps=20",
        "trainer.test_freq=0",
        f"trainer.output_dir={tmp_path}",
    ]
    assert main(["train", "--config-name", "token_grpo", "rollout.val_kwargs.n=256", *further]) == 0
    rows = read_rows(tmp_path)
    assert rows[-1]["val/exact_match"] - rows[0]["val/exact_match"] > 0.2

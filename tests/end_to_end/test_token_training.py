"""Training a language model: what a run writes, corrects, resumes, replays and learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.marks import slow_but
from support.runs import LEFT, Train, read_rows, stopped_and_whole

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.cli import main
from flowgrpo_rc.records.rollout_files import load_rollout

RC = "algorithm.rollout_correction"


def test_a_run_leaves_what_an_image_run_leaves(train_text: Train, tmp_path: Path) -> None:
    assert train_text() == 0
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= LEFT
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() >= {"val/reward", "val/exact_match"}
    assert rows[1].keys() >= {"actor/grad_norm", "actor/pg_loss", "zero_std_ratio"}
    assert not any(key.startswith("actor/rollout_corr") for key in rows[1])
    lines = (run / "samples" / "step_000002.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 8
    assert samples[0].keys() == {"prompt", "target", "completion", "score"}
    assert samples[0]["prompt"] in (run / "report.html").read_text()


@pytest.mark.slow
def test_sorting_by_length_changes_rounding_alone(
    train_text: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = ("model.dtype=fp64", "rollout.dtype=fp64", "rollout.response_length=32")
    tensors = {}
    for most in (0.0, 1.0):
        monkeypatch.setattr("flowgrpo_rc.policies.token.MOST_PADDING", most)
        run = tmp_path / str(most)
        folder = f"trainer.output_dir={run}"
        assert train_text(*ragged, "actor.ppo_micro_batch_size_per_gpu=2", folder) == 0
        tensors[most] = load_file(run / "checkpoints" / "step_2" / "lora.safetensors")
    assert any(not torch.equal(one, tensors[1.0][name]) for name, one in tensors[0.0].items())
    for name, one in tensors[0.0].items():
        torch.testing.assert_close(one, tensors[1.0][name], atol=1e-8, rtol=1e-6)


@pytest.mark.slow
def test_a_healthy_small_run_has_no_warnings(train_text: Train, tmp_path: Path) -> None:
    """A step has 60 tokens, which cannot tell a fault from a few unlikely tokens."""
    assert train_text("trainer.total_training_steps=8", "trainer.test_freq=8") == 0
    assert read_rows(tmp_path / "run")[-1]["step"] == 8
    assert not (tmp_path / "run" / "health.jsonl").exists()


@pytest.mark.slow
def test_an_engine_with_coarse_weights_is_reported_in_a_small_run(
    train_text: Train, tmp_path: Path
) -> None:
    larger = ("data.train_batch_size=16", "rollout.n=8", "trainer.total_training_steps=6")
    assert train_text(*larger, "rollout.name=support.faulty_engines.CoarseTextWeights") == 0
    (warning,) = (tmp_path / "run" / "health.jsonl").read_text().splitlines()
    assert "mismatch_over_expected" in warning


def always(sample: str, prompt: Prompt) -> float:
    return 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("further", "words"),
    [
        (f"reward.terms.own.path={__name__}:always", "the reward is 0.25 for every sample"),
        ("rollout.temperature=1e-6", "they are identical; raise rollout.temperature"),
    ],
)
def test_a_run_that_learns_nothing_says_why(
    train_text: Train, tmp_path: Path, further: str, words: str
) -> None:
    given = ["trainer.total_training_steps=3", "trainer.test_freq=-1"]
    given += ["trainer.val_before_train=false", "rollout.temperature=4"]
    if "own" in further:
        given += ["reward.terms.exact_match.weight=0", "reward.terms.own._target_=function"]
    assert train_text(*given, further) == 0
    lines = (tmp_path / "run" / "health.jsonl").read_text().splitlines()
    (warning,) = [line for line in lines if "zero_std_ratio" in line]
    assert words in warning


SETTINGS = {
    "pg": (
        f"{RC}=bypass_pg_geo_rs_token_tis",
        f"{RC}.rollout_is_batch_normalize=true",
        "model.gradient_checkpointing=true",
    ),
    "veto_rloo": (
        f"{RC}=slime_mis_veto",
        f"{RC}.metric_names=both",
        "algorithm.adv_estimator=rloo",
        "actor.ppo_epochs=2",
    ),
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


@pytest.mark.parametrize("name", slow_but(["pg"], SETTINGS))
def test_settings_train(train_text: Train, tmp_path: Path, name: str) -> None:
    assert train_text(*SETTINGS[name]) == 0
    rows = read_rows(tmp_path / "run")[1:]
    assert all(value is not None and math.isfinite(value) for row in rows for value in row.values())
    if name == "slime":  # responses of one token
        assert rows[0]["response/limit_fraction"] > 0


def test_a_resumed_run_is_bit_equal(train_text: Train, tmp_path: Path) -> None:
    stopped_and_whole(train_text, tmp_path, f"{RC}=seq_is")


@pytest.mark.slow
def test_saved_rollouts_train_another_run_with_their_own_log_probs(
    train_text: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, replayed = tmp_path / "run", tmp_path / "replayed"
    assert train_text("trainer.save_rollouts=true") == 0
    names = [f"step_{step:06d}_process_0_of_1.safetensors" for step in (1, 2)]
    files = sorted((source / "rollouts").iterdir())
    assert [path.name for path in files] == names
    replay = (f"data.replay_dir={source}", "actor.optim.lr=3e-3", "trainer.total_training_steps=4")
    assert train_text(*replay, f"trainer.output_dir={replayed}") == 0
    there, here = read_rows(source)[1], read_rows(replayed)
    assert here[1]["reward/mean"] == there["reward/mean"]
    # The first step is the same policy on the same data; the third sees data of a policy that is
    # two steps old.
    perplexity, mismatch = "rollout_corr/rollout_log_ppl", "rollout_corr/logprob_abs_diff_mean"
    assert here[1][perplexity] == here[3][perplexity] == there[perplexity]
    assert here[3][mismatch] > 3 * there[mismatch]
    batch, rewards, _ = load_rollout(files[0], torch.device("cpu"))
    assert len(batch) == len(rewards.total) == 16
    for further, words in (
        ("rollout.temperature=0.5", "temperature"),
        ("rollout.n=2", "rollout.n"),
        (f"data.replay_dir={tmp_path}", "save_rollouts"),
        ("rollout.response_length=7", "8 there, 7 here"),
    ):
        assert train_text(replay[0], further, f"trainer.output_dir={tmp_path / 'refused'}") == 2
        assert words in capsys.readouterr().err
    files[1].write_bytes(files[1].read_bytes()[:-100])
    assert train_text(*replay, f"trainer.output_dir={tmp_path / 'damaged'}") == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_rollouts_are_reproducible_and_those_after_the_checkpoint_are_deleted(
    train_text: Train, tmp_path: Path
) -> None:
    contents = []
    for name in ("a", "b"):
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        (folder / "rollouts" / "step_000007_process_0_of_1.safetensors").touch()
        saving = ("trainer.save_rollouts=true", "trainer.total_training_steps=1")
        assert train_text(*saving, f"trainer.output_dir={folder}") == 0
        (file,) = (folder / "rollouts").iterdir()
        assert file.name == "step_000001_process_0_of_1.safetensors"
        contents.append(file.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_wholly_rejected_samples_leave_the_baseline(train_text: Train, tmp_path: Path) -> None:
    reject_much = (f"{RC}.rollout_rs=seq_max_k2", f"{RC}.rollout_rs_threshold=1e-6")
    rows = []
    for on in ("true", "false"):
        folder = f"trainer.output_dir={tmp_path / on}"
        assert train_text(*reject_much, f"{RC}.exclude_rejected={on}", folder) == 0
        rows.append(read_rows(tmp_path / on)[1])
    excluded = rows[0]["rollout_corr/excluded_fraction"]
    assert 0 < excluded < 1
    assert excluded == rows[0]["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert "rollout_corr/excluded_fraction" not in rows[1]
    assert rows[0]["advantages/std"] != rows[1]["advantages/std"]


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    """Twenty steps at the shipped settings. The whole run is in the README."""
    further = ("rollout.val_kwargs.n=256", "trainer.total_training_steps=20", "trainer.test_freq=0")
    folder = f"trainer.output_dir={tmp_path}"
    assert main(["train", "--config-name", "token_grpo", *further, folder]) == 0
    rows = read_rows(tmp_path)
    assert rows[-1]["val/exact_match"] - rows[0]["val/exact_match"] > 0.2

"""Training a random image model: what a run writes, resumes, exports and refuses to repeat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.marks import slow_but
from support.runs import (
    LEFT,
    Train,
    Trained,
    final_state,
    read_rows,
    training_rows,
)

from flowgrpo_rc.cli import main

RC = "algorithm.rollout_correction"
QUICKSTART = (
    f"{RC}.bypass_mode=True",
    f"{RC}.rollout_is=sequence",
    f"{RC}.rollout_rs=seq_mean_k1",
    f"{RC}.rollout_rs_threshold=0.5_2.0",
)
DOCUMENTED = {"kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq"}
DOCUMENTED |= {"rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"}
DOCUMENTED |= {"rollout_is_veto_fraction", "rollout_rs_masked_fraction"}
DOCUMENTED |= {"rollout_rs_seq_masked_fraction", "logprob_abs_diff_mean"}


def test_two_steps_with_all_three_text_encoders(trained: Trained) -> None:
    run = trained()
    assert {path.name for path in run.iterdir()} >= LEFT
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() >= {"val/reward", "val/jpeg"}
    written = {"actor/grad_norm", "actor/pg_loss", "actor/lr", "zero_std_ratio", "reward/mean"}
    assert rows[1].keys() >= written | {f"rollout_corr/{name}" for name in DOCUMENTED}
    assert not any(key.startswith("actor/rollout_corr") for key in rows[1])
    # fp32 rollout in the shape of the training forward: no mismatch at all.
    assert rows[1]["rollout_corr/logprob_abs_diff_max"] == 0
    assert rows[1]["rollout_corr/rollout_is_mean"] == 1
    names = {path.name for path in (run / "samples").iterdir()}
    assert names >= {"step_000000.png", "step_000002.png"}


def test_quickstart_of_the_diffusion_document(trained: Trained) -> None:
    row = read_rows(trained(*QUICKSTART, "rollout.dtype=bf16"))[1]
    assert row.keys() >= {f"actor/rollout_corr/{name}" for name in DOCUMENTED}
    assert not any(key.startswith("rollout_corr/") for key in row)
    assert row["actor/rollout_corr/logprob_abs_diff_max"] > 0
    assert any(key.startswith("actor/rollout_corr/logprob_abs_diff/ts_") for key in row)
    assert row["actor/clip_fraction"] > 0


SETTINGS = {
    "reinforce": (f"{RC}.bypass_mode=true", f"{RC}.loss_type=reinforce", f"{RC}.rollout_is=token"),
    "kl_guidance_cps_peers": (
        "actor.use_kl_loss=true",
        "rollout.pipeline.guidance_scale=4.5",
        "data.negative_prompt=blurry",
        "rollout.dtype=fp16",
        "actor.ema.enable=false",
        "rollout.algo.sde_type=cps",
        "rollout.algo.log_prob_convention=peers",
        "rollout.algo.window_sharing=sample",
        "algorithm.adv_estimator=grpo",
        "actor.optim.lr_scheduler=cosine",
        "actor.optim.lr_warmup_steps=1",
    ),
    "bf16_training": (
        "model.dtype=bf16",
        "trainer.mixed_precision=bf16",
        "algorithm.adv_estimator=dr_grpo",
        "rollout.algo.sde_type=dance_sde",
        "rollout.algo.noise_level=0.3",
        "actor.ppo_epochs=2",
    ),
}


@pytest.mark.parametrize("name", slow_but(["reinforce"], SETTINGS))
def test_settings_train(trained: Trained, name: str) -> None:
    row = read_rows(trained(*SETTINGS[name]))[2]
    assert np.isfinite(row["actor/grad_norm"])
    assert row["actor/grad_norm"] > 0


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(trained: Trained) -> None:
    checkpointed = trained("model.gradient_checkpointing=true")
    assert final_state(checkpointed)[0] == final_state(trained())[0]


def test_a_finished_run_says_so_and_changes_nothing(
    train: Train, trained: Trained, capsys: pytest.CaptureFixture
) -> None:
    run = trained()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert train(f"trainer.output_dir={run}") == 0
    said = capsys.readouterr().out
    assert "finished" in said
    assert said.endswith(f"model.lora_path={run}/lora trainer.output_dir={run}_2\n")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "start"])
def test_the_kl_of_a_run_from_a_lora_is_to_the_reference_that_it_names(
    trained: Trained, train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, reference
) -> None:
    start = ("actor.use_kl_loss=true", f"model.lora_path={trained() / 'lora'}")
    short = ("data.train_batch_size=2", "trainer.total_training_steps=1", "actor.ema.enable=false")
    short = (*short, "trainer.test_freq=-1", "trainer.val_before_train=false")
    assert train(*start, f"actor.kl_reference={reference}", *short) == 0
    said = {"base": "pulls to the base model", "start": "pulls to the LoRA as it was"}[reference]
    assert said in " ".join(capsys.readouterr().out.split())
    # One update: its KL is that of the start.
    kl = read_rows(tmp_path / "run")[-1]["actor/kl_loss"]
    assert (kl == 0) == (reference == "start")


def test_a_run_without_evaluations_trains_the_same(trained: Trained, tmp_path: Path) -> None:
    """Takes the keys as verl does: test_freq=-1 means no evaluation at the end either."""
    runs = {
        "all": trained("trainer.test_freq=1"),
        "ends": trained(),
        "none": trained("trainer.val_before_train=false", "trainer.test_freq=-1"),
    }
    evaluated = {
        name: [row["step"] for row in read_rows(run) if "val/reward" in row]
        for name, run in runs.items()
    }
    assert evaluated == {"all": [0, 1, 2], "ends": [0, 2], "none": []}
    for run in runs.values():
        assert training_rows(run)[-2:] == training_rows(runs["none"])
    run = runs["none"]
    assert "Not evaluated yet" in (run / "report.html").read_text()
    assert "The run was not evaluated." in (run / "lora" / "README.md").read_text()
    assert not list(run.glob("samples/*"))
    assert main(["compare", str(run), str(runs["ends"]), "--out", str(tmp_path / "c.html")]) == 0


def test_commands_on_a_run(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = shutil.copytree(trained(), tmp_path / "run")
    assert main(["eval", str(run)]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    exported = (tmp_path / "out" / "pytorch_lora_weights.safetensors").read_bytes()
    assert exported == (run / "lora" / "pytorch_lora_weights.safetensors").read_bytes()
    assert main(["report", str(run)]) == 0
    assert main(["doctor"]) == 0
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__

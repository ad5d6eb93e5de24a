"""Training a random image model: what a run writes, resumes, exports and refuses to repeat."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.marks import slow, slow_but
from support.runs import (
    LEFT,
    Train,
    Trained,
    final_state,
    fingerprint,
    read_rows,
    training_rows,
)
from torch import Tensor

from flowgrpo_rc.cli import main
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint

RC = "algorithm.rollout_correction"
ALPHA = {8: (), 6: ("model.lora_alpha=6",)}  # 8 is what `trained` has
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
    "kl_and_guidance": (
        "actor.use_kl_loss=true",
        "rollout.pipeline.guidance_scale=4.5",
        "data.negative_prompt=blurry",
        "rollout.dtype=fp16",
        "actor.ema.enable=false",
    ),
    "cps_peers": (
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


@pytest.mark.parametrize("name", slow_but(["kl_and_guidance", "cps_peers"], SETTINGS))
def test_settings_train(trained: Trained, name: str) -> None:
    row = read_rows(trained(*SETTINGS[name]))[2]
    assert np.isfinite(row["actor/grad_norm"])
    assert row["actor/grad_norm"] > 0


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


def test_a_start_that_failed_does_not_hold_its_folder(train: Train) -> None:
    assert train("rollout.pipeline.height=33") == 2
    assert train("trainer.total_training_steps=1", "trainer.test_freq=-1") == 0


@pytest.mark.parametrize("alpha", [8, 6], ids=["folded", "with_metadata"])
def test_training_goes_on_from_an_exported_lora(
    trained: Trained, checkpoint: Path, alpha: int
) -> None:
    run = trained(*ALPHA[alpha])
    averages = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).tensors["ema"]

    def parameters(alpha: int) -> dict[str, Tensor]:
        config = ModelConfig(
            path=str(checkpoint), lora_rank=4, lora_alpha=alpha, lora_path=str(run / "lora")
        )
        network = add_lora(load_model(config, torch.device("cpu")), config, seed=99)
        return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    assert fingerprint(parameters(alpha)) == fingerprint(averages)
    # Another alpha here scales lora_B, so that the effect stays that of the file.
    for name, parameter in parameters(16).items():
        factor = alpha / 16 if "lora_B" in name else 1.0
        torch.testing.assert_close(parameter, factor * averages[name])


@pytest.mark.parametrize("reference", [slow("base"), "start"])
def test_the_kl_of_a_run_from_a_lora_is_to_the_reference_that_it_names(
    trained: Trained, train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, reference
) -> None:
    lora = trained(*ALPHA[8]) / "lora"
    given = ("actor.use_kl_loss=true", f"actor.kl_reference={reference}", f"model.lora_path={lora}")
    short = ("data.train_batch_size=2", "trainer.total_training_steps=1", "actor.ema.enable=false")
    assert train(*given, *short, f"trainer.output_dir={tmp_path / 'run'}") == 0
    said = {"base": "pulls to the base model", "start": "pulls to the LoRA as it was"}[reference]
    assert said in " ".join(capsys.readouterr().out.split())
    # One update: its KL is that of the start.
    kl = read_rows(tmp_path / "run")[-1]["actor/kl_loss"]
    assert (kl == 0) == (reference == "start")


def test_a_run_without_evaluations_trains_the_same(trained: Trained, tmp_path: Path) -> None:
    """Takes the keys as verl does: val_before_train means the start alone, -1 the end, too."""
    no_start = "trainer.val_before_train=false"
    runs = {
        "all": trained("trainer.test_freq=1"),
        "ends": trained(),
        "end": trained(no_start),
        "none": trained(no_start, "trainer.test_freq=-1"),
    }
    evaluated = {
        name: [row["step"] for row in read_rows(run) if "val/reward" in row]
        for name, run in runs.items()
    }
    assert evaluated == {"all": [0, 1, 2], "ends": [0, 2], "end": [2], "none": []}
    for run in runs.values():
        assert training_rows(run)[-2:] == training_rows(runs["none"])
    run = runs["none"]
    assert "Not evaluated yet" in (run / "report.html").read_text()
    assert "The run was not evaluated." in (run / "lora" / "README.md").read_text()
    assert not list(run.glob("samples/*"))
    assert main(["compare", str(run), str(runs["ends"]), "--out", str(tmp_path / "c.html")]) == 0


def test_trackers_and_commands_on_a_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert train("trainer.logger=[console,tensorboard]") == 0
    run = tmp_path / "run"
    assert list(run.rglob("events.out.tfevents.*"))
    assert main(["eval", str(run)]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    exported = (tmp_path / "out" / "pytorch_lora_weights.safetensors").read_bytes()
    assert exported == (run / "lora" / "pytorch_lora_weights.safetensors").read_bytes()
    assert main(["report", str(run)]) == 0
    assert main(["doctor"]) == 0
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__

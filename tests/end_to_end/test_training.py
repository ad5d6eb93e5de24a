"""Training a random image model: what a run writes, resumes, exports and refuses to repeat."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from support.launching import wait_for
from support.runs import Train, Trained, fingerprint, read_rows, without_timings

from flowgrpo_rc.cli import main
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.models.lora_files import load_export
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder

RC = "algorithm.rollout_correction"
ALPHA = {8: (), 6: ("model.lora_alpha=6",)}  # 8 is what `trained` has
QUICKSTART = (
    f"{RC}.bypass_mode=True",
    f"{RC}.rollout_is=sequence",
    f"{RC}.rollout_rs=seq_mean_k1",
    f"{RC}.rollout_rs_threshold=0.5_2.0",
)
DOCUMENTED = (
    *("rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"),
    *(
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
        "kl",
        "k3_kl",
        "log_ppl_diff",
    ),
    *(
        "chi2_token",
        "chi2_seq",
        "log_ppl_abs_diff",
        "rollout_is_veto_fraction",
        "logprob_abs_diff_mean",
    ),
)


def test_two_steps_with_all_three_text_encoders(trained: Trained) -> None:
    run = trained()
    names = {path.name for path in run.iterdir()}
    expected = {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "lora",
        "report.html",
    }
    assert expected <= names
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"val/reward", "val/jpeg"} <= rows[0].keys()
    assert {
        "actor/grad_norm",
        "actor/pg_loss",
        "actor/lr",
        "zero_std_ratio",
        "reward/mean",
    } <= rows[1].keys()
    assert all(f"rollout_corr/{name}" in rows[1] for name in DOCUMENTED)
    assert not any(key.startswith("actor/rollout_corr") for key in rows[1])
    # fp32 rollout in the shape of the training forward: no mismatch at all.
    assert rows[1]["rollout_corr/logprob_abs_diff_max"] == 0
    assert rows[1]["rollout_corr/rollout_is_mean"] == 1
    assert (run / "samples" / "step_000000.png").is_file()
    assert (run / "samples" / "step_000002.png").is_file()


def test_quickstart_of_the_diffusion_document(train: Train, tmp_path: Path) -> None:
    assert train(*QUICKSTART, "rollout.dtype=bf16") == 0
    row = read_rows(tmp_path / "run")[1]
    assert all(f"actor/rollout_corr/{name}" in row for name in DOCUMENTED)
    assert not any(key.startswith("rollout_corr/") for key in row)
    assert row["actor/rollout_corr/logprob_abs_diff_max"] > 0
    timesteps = [key for key in row if key.startswith("actor/rollout_corr/logprob_abs_diff/ts_")]
    assert timesteps
    assert row["actor/clip_fraction"] > 0


def test_decoupled_mode_with_weights_and_rejection(train: Train, tmp_path: Path) -> None:
    rejecting = (
        f"{RC}.rollout_is=sequence",
        f"{RC}.rollout_rs=seq_max_k2",
        f"{RC}.rollout_rs_threshold=1e-12",
    )
    assert train(*rejecting, "rollout.dtype=bf16") == 0
    row = read_rows(tmp_path / "run")[1]
    assert row["rollout_corr/rollout_is_mean"] != 1
    assert row["rollout_corr/rollout_rs_seq_masked_fraction"] > 0


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
        "algorithm.global_std=false",
        "actor.optim.lr_scheduler=cosine",
        "actor.optim.lr_warmup_steps=1",
    ),
    "bf16_training": (
        "model.dtype=bf16",
        "trainer.mixed_precision=bf16",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "rollout.algo.sde_type=dance_sde",
        "rollout.algo.noise_level=0.3",
        "actor.ppo_epochs=2",
    ),
}


@pytest.mark.parametrize("further", SETTINGS.values(), ids=SETTINGS)
def test_settings_train(train: Train, tmp_path: Path, further: tuple[str, ...]) -> None:
    assert train(*further) == 0
    row = read_rows(tmp_path / "run")[2]
    assert np.isfinite(row["actor/grad_norm"])
    assert row["actor/grad_norm"] > 0


def test_gradient_checkpointing_changes_nothing(trained: Trained) -> None:
    plain, checkpointed = (
        fingerprint(load_file(run / "lora" / "pytorch_lora_weights.safetensors"))
        for run in (trained(), trained("model.gradient_checkpointing=true"))
    )
    assert plain == checkpointed


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


def test_another_setting_in_the_same_folder_is_refused(
    train: Train, trained: Trained, capsys: pytest.CaptureFixture
) -> None:
    assert train(f"trainer.output_dir={trained()}", "actor.optim.lr=2e-3") == 2
    error = capsys.readouterr().err
    assert "actor.optim.lr" in error
    assert "trainer.output_dir" in error


def test_a_start_that_failed_does_not_hold_its_folder(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert train("rollout.pipeline.height=33") == 2
    assert "rollout.pipeline.height=33" in capsys.readouterr().err
    assert train("trainer.total_training_steps=1", "trainer.test_freq=-1") == 0


def test_a_folder_in_use_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with RunFolder(tmp_path / "run").locked():
        assert train() == 2
    assert "in use" in capsys.readouterr().err


@pytest.mark.parametrize("alpha", [8, 6], ids=["power_of_two", "other_scale"])
def test_exported_lora_gives_bit_equal_images_in_stock_diffusers(
    trained: Trained, checkpoint: Path, alpha: int
) -> None:
    run = trained(*ALPHA[alpha])
    config = ModelConfig(path=str(checkpoint), lora_rank=4, lora_alpha=alpha)
    model = load_model(config, torch.device("cpu"))
    transformer = add_lora(model, config, seed=0)
    newest = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(newest.tensors["ema"][name])
    stock = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    stock.set_progress_bar_config(disable=True)
    settings = {
        "prompt": ['"AB7X"', '"HELP"'],
        "height": 32,
        "width": 64,
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "max_sequence_length": 16,
        "latents": normal((8, 8, 16), [1, 2], "latents"),
        "output_type": "np",
    }
    base = stock(**settings).images
    stock.load_lora_weights(run / "lora")
    loaded = stock(**settings).images
    trained = model.pipeline(**settings).images
    assert not np.array_equal(base, loaded)
    assert np.array_equal(loaded, trained)


@pytest.mark.parametrize("alpha", [8, 6], ids=["folded", "with_metadata"])
def test_training_goes_on_from_an_exported_lora(
    trained: Trained, tmp_path: Path, checkpoint: Path, alpha: int
) -> None:
    run = trained(*ALPHA[alpha])
    exported = run / "lora"
    config = ModelConfig(
        path=str(checkpoint), lora_rank=4, lora_alpha=alpha, lora_path=str(exported)
    )
    model = load_model(config, torch.device("cpu"))
    transformer = add_lora(model, config, seed=99)
    averages = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).tensors["ema"]
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, averages[name])
    # Another alpha here scales lora_B, so that the effect stays that of the file.
    stronger = ModelConfig(
        path=str(checkpoint), lora_rank=4, lora_alpha=16, lora_path=str(exported)
    )
    rescaled = load_model(stronger, torch.device("cpu"))
    for name, parameter in add_lora(rescaled, stronger, seed=0).named_parameters():
        if parameter.requires_grad:
            factor = alpha / 16 if "lora_B" in name else 1.0
            torch.testing.assert_close(parameter.data, factor * averages[name])
    wrong = ModelConfig(path=str(checkpoint), lora_rank=8, lora_alpha=8, lora_path=str(exported))
    other = load_model(wrong, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model\.lora_rank=8"):
        add_lora(other, wrong, seed=0)
    empty = ModelConfig(path=str(checkpoint), lora_path=str(tmp_path))
    with pytest.raises(ValueError, match="pytorch_lora_weights"):
        load_export(transformer, empty)


def test_evaluation_consumes_no_training_randomness(trained: Trained) -> None:
    runs = (trained(), trained("trainer.test_freq=1"))
    rows = [without_timings(read_rows(run)) for run in runs]
    for often, rarely in zip(*rows, strict=True):
        assert {k: v for k, v in often.items() if not k.startswith("val/")} == {
            k: v for k, v in rarely.items() if not k.startswith("val/")
        }


def test_a_run_without_evaluations_trains_the_same(trained: Trained, tmp_path: Path) -> None:
    """Takes the keys as verl does: val_before_train means the start alone, -1 the end, too."""
    no_start = "trainer.val_before_train=false"
    runs = {
        "both": trained(),
        "end": trained(no_start),
        "none": trained(no_start, "trainer.test_freq=-1"),
    }
    rows = {name: without_timings(read_rows(run)) for name, run in runs.items()}
    evaluated = {
        name: [row["step"] for row in found if "val/reward" in row] for name, found in rows.items()
    }
    assert evaluated == {"both": [0, 2], "end": [2], "none": []}
    assert rows["none"] == [
        {key: value for key, value in row.items() if not key.startswith("val/")}
        for row in rows["both"][1:]
    ]
    run = runs["none"]
    assert "Not evaluated yet" in (run / "report.html").read_text()
    assert "The run was not evaluated." in (run / "lora" / "README.md").read_text()
    assert not list(run.glob("samples/*"))
    assert main(["compare", str(run), str(runs["both"]), "--out", str(tmp_path / "c.html")]) == 0


def _num_rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_signal_finishes_the_step_saves_and_exits_with_75(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"

    def send() -> None:
        wait_for(lambda: _num_rows(run) >= 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert train("trainer.total_training_steps=50") == 75
    sender.join()
    assert "SIGTERM" in capsys.readouterr().out
    steps = [row["step"] for row in read_rows(run)]
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step_{steps[-1]}"
    assert steps[-1] < 50
    assert (run / "report.html").is_file()


def test_max_time_stops_and_the_same_command_goes_on(train: Train, tmp_path: Path) -> None:
    assert train("trainer.max_time=0.001") == 75
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1]
    assert train("trainer.max_time=0.001") == 0
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1, 2]


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

"""Bad input ends with exit code 2 and one line.

The line says what was given, what is allowed and which key to change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Train

from flowgrpo_rc.cli import main
from flowgrpo_rc.models import base

RC = "algorithm.rollout_correction"


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the test if a pipeline is loaded."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(base.DiffusionPipeline, "from_pretrained", fail)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optim.learning_rate=1", ["actor.optim.learning_rate", "did you mean"]),
        ("actor.optim.lrr=1", ["actor.optim.lrr", "did you mean actor.optim.lr?"]),
        ("+new.key=1", ["unknown key new.key"]),
        ("actor.optim.lr=fast", ["actor.optim.lr", "fast"]),
        ("rollout.n=many", ["rollout.n", "many"]),
        ("rollout.n=1", ["rollout.n=1", "at least 2"]),
        ("actor.optim.lr=-1", ["actor.optim.lr=-1", "above 0"]),
        ("actor.diffusion_loss.clip_ratio=2", ["clip_ratio=2", "between 0 and 1"]),
        ("rollout.dtype=int3", ["rollout.dtype='int3'", "fp32, bf16, fp16"]),
        ("rollout.algo.sde_type=ode", ["rollout.algo.sde_type='ode'", "sde, cps, dance_sde"]),
        ("rollout.algo.noise_level=0", ["rollout.algo.noise_level", "above 0"]),
        ("rollout.algo.sde_window_range=[0,9]", ["sde_window_range", "4 steps"]),
        ("rollout.algo.sde_window_range=[3]", ["sde_window_range=[3]", "two step indices"]),
        ("rollout.algo.tail=heun", ["rollout.algo.tail", "euler, ab2"]),
        ("rollout.algo.tail_steps=0", ["rollout.algo.tail_steps=0", "at least 1"]),
        ("rollout.val_kwargs.n=0", ["rollout.val_kwargs.n=0", "at least 1"]),
        ("rollout.val_kwargs.batch_size=0", ["rollout.val_kwargs.batch_size=0"]),
        ("rollout.pipeline.condition_images=1", ["rollout.pipeline.condition_images=1"]),
        ("rollout.pipeline.condition_images=-1", ["condition_images=-1", "at least 0"]),
        ("rollout.pipeline.condition_pixels=99", ["condition_pixels=99 has no effect"]),
        ("data.negative_prompt=blurry", ["data.negative_prompt", "guidance_scale"]),
        ("actor.ema.update_interval=99", ["actor.ema.update_interval=99", "4 updates"]),
        ("actor.optim.lr=inf", ["actor.optim.lr=inf"]),
        (
            "rollout.algo.sde_window_size=4",
            ["sde_window_size=4", "1 to 3", "rollout.pipeline.num_inference_steps"],
        ),
        ("actor.ppo_micro_batch_size_per_gpu=3", ["ppo_micro_batch_size_per_gpu=3", "4 samples"]),
        ("actor.train_n=0", ["actor.train_n=0", "at least 1"]),
        ("actor.ppo_mini_batch_size=3", ["actor.ppo_mini_batch_size=3", "data.train_batch_size"]),
        (f"{RC}.rollout_rs=seq_mean_k9", ["seq_mean_k9", "did you mean"]),
        (f"{RC}.rollout_is=always", ["rollout_is='always'", "token, sequence"]),
        (f"{RC}.loss_type=reinforce", ["loss_type=reinforce", "bypass_mode=true"]),
        (
            f"{RC}.rollout_rs_threshold=null",
            ["rollout_rs=token_k1", "needs", "rollout_rs_threshold"],
        ),
        (f"{RC}.rollout_rs=seq_mean_k1,token_k1", ["must be a list"]),
        ("rollout.calculate_log_probs=false", ["rollout.calculate_log_probs"]),
        ("rollout.name=warp", ["rollout.name=warp", "diffusers, transformers"]),
        ("reward.terms.ocrr.weight=1", ["ocrr", "did you mean"]),
        ("reward.terms.jpeg.objctive=x", ["objctive", "objective"]),
        ("model.path=/does/not/exist", ["model.path=/does/not/exist"]),
        ("model.lora_path=/does/not/exist", ["model.lora_path=/does/not/exist"]),
        ("data.train_files=/does/not/exist.txt", ["data.train_files", "/does/not/exist.txt"]),
        ("data.val_files=null", ["data.val_files"]),
        ("data.train_batch_size=64", ["data.train_batch_size=64", "8"]),
        ("trainer.logger=[console,paper]", ["trainer.logger", "paper"]),
        ("trainer.output_dir=/proc/nothing", ["trainer.output_dir=/proc/nothing"]),
        ("trainer.max_time=0", ["trainer.max_time"]),
    ],
)
def test_one_wrong_setting(
    train: Train, capsys: pytest.CaptureFixture, override: str, words: list[str]
) -> None:
    assert train(override) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("threshold", ['"2.0_0.5"', "0.5_2"])
def test_bands(train: Train, capsys: pytest.CaptureFixture, threshold: str) -> None:
    """A reversed band, and the band that Hydra reads as the number 0.52."""
    assert train(f"{RC}.rollout_rs=seq_mean_k1", f"{RC}.rollout_rs_threshold={threshold}") == 2
    error = capsys.readouterr().err
    assert "rollout_rs_threshold" in error
    assert ("quote" in error) == (threshold == "0.5_2")


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("content", "words"),
    [("", ["has no prompt"]), ('"AB"\nno quotes here\n"CD"\n', ["line 2"])],
    ids=["empty", "quotes"],
)
def test_prompt_files(
    train: Train, capsys: pytest.CaptureFixture, tmp_path: Path, content: str, words: list[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(content)
    assert train(f"data.train_files={path}", "reward.terms.ocr.weight=1") == 2
    error = capsys.readouterr().err
    assert "data.train_files" in error
    assert str(path) in error
    assert all(word in error for word in words)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_folder_that_is_no_pipeline_and_a_config_that_is_not_there(
    train: Train, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert train(f"model.path={tmp_path}") == 2
    assert "model_index.json" in capsys.readouterr().err
    assert main(["train", "--config-name", "nothing"]) == 2
    assert "tiny_ocr" in capsys.readouterr().err
    assert main(["train", "--config-dir", str(tmp_path / "x")]) == 2
    assert "--config-dir" in capsys.readouterr().err


def test_the_dry_run_and_the_printed_configuration_load_nothing(
    train: Train, capsys: pytest.CaptureFixture, nothing_is_loaded: None
) -> None:
    assert train("--dry-run") == 0
    assert "8 training prompts, 8 held-out prompts" in capsys.readouterr().out
    assert train("--cfg", "job") == 0
    assert "lora_rank: 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (("trainer.strategy=fsdp",), ("trainer.strategy='fsdp'", "auto, ddp, fsdp2")),
        (("trainer.timeout_s=0",), ("trainer.timeout_s=0",)),
        (("model.dtype=fp64", "trainer.device=auto"), ("model.dtype=fp64", "trainer.device=cpu")),
        (
            ("rollout.dtype=fp64", "trainer.mixed_precision=bf16"),
            ("rollout.dtype=fp64", "trainer.mixed_precision=no"),
        ),
    ],
)
def test_bad_settings_of_precision_and_processes(
    overrides: list[str],
    capsys: pytest.CaptureFixture,
    further: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    assert main(["train", *overrides, *further]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.merge_lora=true", "rollout.quantization=int8"], ["merge_lora", "int8"]),
        (
            ["rollout.algo.shared_prefix=true", "rollout.algo.window_sharing=sample"],
            ["shared_prefix", "window_sharing"],
        ),
        (
            ["rollout.algo.shared_prefix=true", "actor.replay=aligned"],
            ["shared_prefix", "aligned"],
        ),
        (
            ["actor.train_n=1", "actor.ppo_micro_batch_size_per_gpu=4"],
            ["micro_batch_size_per_gpu=4", "the 2 samples", "actor.train_n=1"],
        ),
        (
            ["rollout.n=4", "actor.train_n=2", "actor.replay=aligned"],
            ["actor.train_n=2", "aligned"],
        ),
        (
            ["rollout.algo.tail=ab2", "rollout.algo.sde_window_range=[1,4]"],
            ["rollout.algo.tail=ab2 has no effect"],
        ),
    ],
)
def test_two_settings_that_exclude_each_other(
    train: Train, capsys: pytest.CaptureFixture, settings: list[str], words: list[str]
) -> None:
    assert train(*settings) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_an_engine_in_another_process_does_not_follow_tf32(
    train: Train, capsys: pytest.CaptureFixture
) -> None:
    assert train("trainer.tf32=true", "rollout.name=vllm_omni", "rollout.dtype=fp32") == 2
    told = capsys.readouterr().err
    assert "trainer.tf32=true" in told
    assert "rollout.dtype=bf16" in told

"""Shipped experiments compose for the hardware in their name and hold published settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.compositions import checked_config, config_of, resolved
from support.verl_omni_commands import QWEN_IMAGE

from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config, config_folder
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.losses.diffusion_nft import DiffusionNFT
from flowgrpo_rc.models.architecture import find_architecture
from flowgrpo_rc.models.base import ModelConfig, adapter_of
from flowgrpo_rc.rewards.manager import build_terms, check_kind
from flowgrpo_rc.rollout.check_model import check_model
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.spec.check_settings import check_settings

NAMES = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
# Those without a published recipe of their own begin with the one default of images.
DEFAULT = [
    "flux2_klein_4b_edit_ocr_1xh100",
    "qwen_image_edit_ocr_4xh200",
    "sana_600m_ocr_1xh100",
    "sd35_medium_signs_1xh100",
    "wan22_t2v_a14b_ocr_16xh200",
    "wan22_t2v_a14b_ocr_8xh200",
    "z_image_ocr_16xh100",
    "z_image_ocr_8xh100",
    "z_image_turbo_ocr_8xh100",
]
# One has no log-probs to correct.
PUBLISHED = [name for name in NAMES if not (name in DEFAULT or "nft" in name or "_16x" in name)]


def experiment(name: str, *overrides: str) -> Config:
    processes = int(re.search(r"_(\d+)xh\d00$", name)[1])
    return config_of(f"+experiment={name}", *overrides, num_processes=processes)


@pytest.mark.parametrize("name", NAMES)
def test_it_composes_for_the_hardware_in_its_name_and_fits_its_model(name: str) -> None:
    """Products without TF32 cost an fp32 LoRA dearly on a card: a file that has them says why."""
    config = experiment(name)
    assert config.trainer.experiment_name == name
    assert config.trainer.output_dir == f"outputs/{name}"
    folder = find_architecture(config.model.path, config_folder() / "architectures")
    adapter = adapter_of(ModelConfig(path=str(folder)))
    check_model(adapter, config.rollout)
    check_kind(build_terms(config.reward), adapter.makes)
    in_bf16 = adapter.vae_in_bf16 and config.model.dtype == "bf16"
    text = (config_folder() / "experiment" / f"{name}.yaml").read_text()
    assert config.trainer.tf32 or in_bf16 or re.search(r"^  tf32: false  # \w", text, re.MULTILINE)
    assert "signs" in name or str(config.data.train_files).startswith("dataset/")


def has_bands_that_follow(config: Config, *, bypass_mode: bool) -> bool:
    found = config.algorithm.rollout_correction
    bands = (found.rollout_is, found.rollout_rs, found.rollout_rs_threshold)
    return found.bypass_mode is bypass_mode and bands == (None, "token_k1", "auto:4")


def is_default_of_images(config: Config) -> bool:
    """Returns whether it is in bypass mode, centered, with bands and a clip that follow."""
    spec = resolved(config)
    config = spec.config
    clips = config.actor.diffusion_loss.clip_ratio == "auto:16" and spec.keeps_means
    is_centered = config.algorithm.rollout_correction.centered
    return has_bands_that_follow(config, bypass_mode=True) and bool(is_centered) and clips


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_takes_both_corrections(name: str) -> None:
    published = experiment(name)
    assert not published.algorithm.rollout_correction.centered
    recomputed = experiment(name, "+correction=recomputed")
    assert has_bands_that_follow(recomputed, bypass_mode=False)
    assert recomputed.actor == published.actor
    assert is_default_of_images(experiment(name, "+correction=centered"))


@pytest.mark.parametrize("name", DEFAULT)
def test_one_without_a_recipe_has_the_default_of_images(name: str) -> None:
    assert is_default_of_images(experiment(name))


@pytest.mark.parametrize("name", [name for name in NAMES if "_16x" in name])
def test_two_machines_train_twice_the_prompts_and_nothing_else_differs(name: str) -> None:
    larger, config = experiment(name), experiment(name.replace("_16x", "_8x"))
    with pytest.raises(ValueError, match=r": (start|give) \d+"):
        check_settings(resolved(config, 16))
    config.data.train_batch_size *= 2
    config.actor.ppo_mini_batch_size *= 2
    config.trainer.output_dir = f"outputs/{name}"
    config.trainer.experiment_name = name
    assert larger == config


def test_the_default_of_images() -> None:
    assert is_default_of_images(config_of())


def test_the_first_run_of_a_real_model_is_the_recipe_on_prompts_of_the_package() -> None:
    config = experiment("sd35_medium_signs_1xh100")
    sampler, held_out, _ = prompts_of(resolved(config))
    assert (len(sampler.prompts), len(held_out)) == (1000, 200)
    assert config.rollout.val_kwargs.n == 64
    assert not {p.text for p in sampler.prompts} & {p.text for p in held_out}
    assert config.actor.optim == experiment("sd35_medium_ocr_1xh100").actor.optim


def test_it_takes_a_calibration_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    settings = "# @package _global_\nactor: {diffusion_loss: {clip_ratio: 7.0e-4}}\n"
    (tmp_path / "calibration" / "measured.yaml").write_text(settings)
    given = [f"+experiment={NAMES[0]}", "+calibration=measured"]
    config = checked_config(compose_config(given, config_dir=str(tmp_path)))
    assert config.actor.diffusion_loss.clip_ratio == 7e-4
    assert config.model.path == experiment(NAMES[0]).model.path


def test_mixgrpo_flash_evaluates_fewer_steps_behind_its_window() -> None:
    rollout = experiment("flux1_dev_preferences_mixgrpo_flash_8xh100").rollout
    assert [rollout.evaluations(step) for step in (1, 21, 281, 381)] == [12, 13, 25, 25]


def test_diffusion_nft_has_its_published_settings() -> None:
    config = experiment("sd35_medium_ocr_nft_8xh100")
    spec = resolved(config, 8)
    check_settings(spec)
    assert spec.trained_steps == 9
    assert (config.rollout.evaluations(), config.rollout.spec().tail_start) == (10, 0)
    assert (config.actor.kl_loss_coef, config.actor.optim.lr) == (1e-4, 3e-4)
    loss = spec.loss
    assert isinstance(loss, DiffusionNFT)
    assert loss.beta == 0.1
    decays = [loss.old_decay(updates) for updates in (74, 75, 76, 175, 300)]
    assert decays == pytest.approx([0, 0, 0.0075, 0.75, 0.999])


def test_qwen_image_is_the_command_of_verl_omni() -> None:
    """They agree in everything that the published command says about the training."""
    there = compose_config(QWEN_IMAGE)
    here = compose_config(["+experiment=qwen_image_ocr_rollout_corr_4xh800"])
    sections = """model rollout algorithm actor.optim actor.diffusion_loss actor.ema.enable
        actor.use_kl_loss actor.ppo_mini_batch_size data.train_batch_size trainer.mixed_precision
        trainer.total_training_steps trainer.save_freq trainer.test_freq"""
    # Where idle parts are, and how many samples are at work at once, change nothing of what is
    # trained.
    for name in ("gradient_checkpointing", "offload_idle", "decode_batch_size"):
        there.model[name] = here.model[name]
    for name in ("engine_kwargs", "micro_batch_size_per_gpu"):
        there.rollout[name] = here.rollout[name]
    # The guidance that Qwen-Image does not have.
    for config in (there, here):
        config.rollout.pipeline.guidance_scale = config.rollout.val_kwargs.guidance_scale = 1.0
    for section in sections.split():
        assert OmegaConf.select(there, section) == OmegaConf.select(here, section), section


def test_overrides_come_on_top_and_both_spellings_agree(capsys: pytest.CaptureFixture) -> None:
    name = "sd35_medium_ocr_1xh100"
    assert experiment(name, "actor.optim.lr=1e-5").actor.optim.lr == 1e-5
    by_file = compose_config([], config_name=f"experiment/{name}")
    assert compose_config([f"+experiment={name}"]) == by_file
    bypass = "algorithm.rollout_correction.rollout_rs=seq_mean_k1"
    band = 'algorithm.rollout_correction.rollout_rs_threshold="0.9_1.1"'
    corrected = experiment(name, bypass, band).algorithm.rollout_correction
    assert (corrected.bypass_mode, corrected.rollout_rs_threshold) == (True, "0.9_1.1")
    assert main(["train", "--cfg", "job", f"+experiment={name}"]) == 0
    assert "tiny_glyph" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [["--config-name", "tiny_ocr"], [f"+experiment={NAMES[1]}"]],
    ids=["file", "experiment"],
)
def test_one_whole_configuration_at_a_time(other: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "--cfg", "job", *other, f"+experiment={NAMES[0]}"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in (" ".join(other), NAMES[0], "one of them"))


def test_a_missing_dataset_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "+experiment=sd35_medium_ocr_1xh100"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: data.train_files: there is no file or folder dataset/")
    assert str(tmp_path) in error

"""The examples train: the tutorials, a user's own loss and model, the notebook, the scripts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import minimal_flow_grpo
import minimal_token_grpo
import nbformat
import numpy as np
import pytest
import sweep
import torch
from diffusers import DiffusionPipeline
from nbclient import NotebookClient
from support.documented import ROOT
from support.image_rollouts import make_spec, sample_images, trained_lora
from support.runs import Train, read_rows

from flowgrpo_rc import RolloutCorrectionConfig, Run, assets
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.models.vae import keep_channels_last
from flowgrpo_rc.policies.flow import FlowPolicy, no_window

EXAMPLES = ROOT / "examples"
CPU = torch.device("cpu")
MODES = ("bypass", "decoupled")


# --- The tutorials


@pytest.mark.parametrize("mode", MODES)
def test_images_get_bluer(mode: str, tmp_path: Path) -> None:
    grid = tmp_path / "blue.png"
    before, after = minimal_flow_grpo.main(["--mode", mode, "--steps", "5", "--out", str(grid)])
    assert after > before + 0.03
    assert grid.is_file()


# peft reads this attribute of transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("mode", MODES)
def test_sums_get_right(mode: str) -> None:
    before, after = minimal_token_grpo.main(["--mode", mode, "--steps", "8"])
    assert after > before + 0.1


# --- A loss of one's own


def test_the_example_of_a_user_s_loss_trains_images(train: Train, tmp_path: Path) -> None:
    assert train("actor.diffusion_loss.loss_mode=my_loss.Cispo") == 0
    rows = read_rows(tmp_path / "run")
    assert "actor/clip_fraction" in rows[1]
    assert rows[1]["actor/grad_norm"] > 0


# --- A model of one's own


# diffusers' own Chroma uses it.
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
def test_the_example_of_a_user_s_model_is_its_stock_pipeline_and_trains(tmp_path: Path) -> None:
    import my_model

    settings = ("trainer.total_training_steps=1", "rollout.dtype=fp32")
    assert my_model.main(["--out", str(tmp_path), *settings]) == 0
    assert read_rows(tmp_path / "run")[1]["actor/grad_norm"] > 0
    folder = tmp_path / "checkpoint"
    model = load_model(ModelConfig(path=str(folder), adapter="my_model.Chroma"), CPU)
    assert isinstance(model, my_model.Chroma)
    spec = make_spec("sde", 3.5, num_inference_steps=4)
    latents = normal(model.latent_shape(spec), [1, 2])
    positive, negative = (
        model.encode(texts, max_sequence_length=16) for texts in (["a cat", "HELP"], ["blur", ""])
    )
    ours = FlowPolicy(model, model.transformer).rollout(
        latents, positive, negative, spec, no_window(2, latents.device)
    )
    stock = DiffusionPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    keep_channels_last(stock.vae)
    arguments = {
        "height": 32,
        "width": 64,
        "num_inference_steps": 4,
        "max_sequence_length": 16,
        "guidance_scale": 3.5,
    }
    drawn_by = {
        output: stock(
            ["a cat", "HELP"],
            negative_prompt=["blur", ""],
            latents=latents,
            output_type=output,
            **arguments,
        ).images
        for output in ("latent", "np")
    }
    assert torch.equal(ours.final, drawn_by["latent"])
    assert np.array_equal(
        model.decode(ours.final, spec), (drawn_by["np"] * 255).round().astype(np.uint8)
    )
    network = trained_lora(model)
    batch, _ = sample_images(model, network, spec, [[0, 1], [1, 2], [0, 1], [1, 2]])
    assert torch.equal(FlowPolicy(model, network).log_probs(batch, 4), batch.rollout_log_probs)


# --- A sweep


def test_a_sweep_finds_the_best_of_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "trainer.total_training_steps=1 rollout.val_kwargs.n=4 data.train_batch_size=2"
    sizes = "actor.ppo_mini_batch_size=2 actor.ppo_micro_batch_size_per_gpu=4"
    study = sweep.main("2", *small.split(), *sizes.split())
    found = [Run(tmp_path / "outputs/sweep" / name).after["reward"] for name in ("0", "1")]
    assert [trial.value for trial in study.trials] == found
    assert study.best_value == max(found)


# --- The notebooks


def notebook_of(name: str) -> nbformat.NotebookNode:
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # committed clean
    return notebook


def test_the_notebook_trains_with_a_function_of_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE")  # tests run without bars
    notebook = notebook_of("own_reward.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0].source = f"FOLDER = {str(tmp_path / 'run')!r}\nSTEPS = 2"
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    shown = [output for cell in code for output in cell.outputs]
    texts = "".join(output.get("text", "") for output in shown if output.get("name") == "stdout")
    assert re.search(r"training: 100%.* 2/2 .*held-out reward=0\.\d+, reward=0\.1\d+, loss=", texts)
    assert "Loading" not in texts
    (html,) = (out["data"]["text/html"] for out in shown if "text/html" in out.get("data", {}))
    assert re.search(r"Held-out reward 0\.16\d+ \u2192 0\.\d+ ", html)
    assert html.count('<img alt="') == 8


def test_the_notebook_compares_a_lora_in_stock_diffusers(tmp_path: Path) -> None:
    path = str(assets.path("tiny_glyph_sd3"))
    config = ModelConfig(path=path, lora_rank=4, lora_alpha=8)
    network = trained_lora(load_model(config, CPU))
    export_lora(
        {name: p.detach() for name, p in lora_parameters(network).items()}, config, tmp_path
    )
    notebook = notebook_of("compare_lora.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].source.startswith("LORA = ")
    code[0].source = f"LORA = {str(tmp_path)!r}"
    code[1].source += "\nPROMPTS = PROMPTS[:2]\nSEEDS = [1]"
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    shown = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    (change,) = [
        output.text for output in shown if output.get("text", "").startswith("mean change")
    ]
    assert float(change.split(": ")[1].split(";")[0]) > 0.5


CAPPED = (
    "trainer.total_training_steps=1",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.val_kwargs.n=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
)


def arguments_of(script: Path, folder: Path, *options: str, bundled: str) -> list[str]:
    """Returns what a script gives to the programs that it calls, which do nothing here."""
    for name in ("flowgrpo-rc", "accelerate"):
        command = folder / name
        command.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > given\n')
        command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "BUNDLED": bundled}
    subprocess.run(["bash", script, *options], cwd=folder, env=environment, check=True)
    return (folder / "given").read_text().splitlines()


OF_DOCUMENTS = {
    "run_qwen_image_ocr_lora_rollout_corr": {
        "bypass_mode": True,
        "centered": False,
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.5_2.0",
    },
    "run_with_rollout_corr": {"rollout_is": "token", "rollout_is_threshold": 2.0},
}
SCRIPTS = sorted((*EXAMPLES.glob("ocr_*.sh"), *EXAMPLES.glob("*/run_*.sh")))


@pytest.mark.parametrize("bundled", ["", "1"])
@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_the_scripts_of_the_documents_have_their_settings(
    name: str, bundled: str, tmp_path: Path
) -> None:
    (script,) = EXAMPLES.glob(f"*/{name}.sh")
    given = arguments_of(script, tmp_path, bundled=bundled)
    words = [word for word in given if "=" in word]
    file = "token_grpo" if "token_grpo" in given else None
    correction = compose_config(words, config_name=file).algorithm.rollout_correction
    assert dict(correction) == vars(RolloutCorrectionConfig()) | OF_DOCUMENTS[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_for_the_bundled_model_run(script: Path, tmp_path: Path) -> None:
    """They give their arguments to the command, which is run here without an import of its own."""
    given = arguments_of(script, tmp_path, *CAPPED, bundled="1")
    assert given[-len(CAPPED) :] == list(CAPPED)
    assert main(given) == 0
    assert len(list(tmp_path.glob("outputs/**/report.html"))) == 1

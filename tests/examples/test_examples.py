"""The examples: tutorials learn, by the package's own loss; parts of one's own train; the notebook
runs.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import minimal_flow_grpo
import minimal_token_grpo
import nbformat
import numpy as np
import pytest
import torch
from conftest import Train, read_rows
from diffusers import DiffusionPipeline
from nbclient import NotebookClient
from policies.test_flow import sample, trained_lora
from support.builders import assert_same, diffusion_batch, gradient_of, log_probs, token_batch
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.cli import main
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.correction.api import apply_bypass_mode, apply_rollout_correction_to_batch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.export.lora import export_lora
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig
from flowgrpo_rc.losses.diffusion import diffusion_loss
from flowgrpo_rc.losses.token import token_loss
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")
MODES = ("bypass", "decoupled")


# --- the tutorials


@pytest.mark.parametrize("name", ["minimal_flow_grpo", "minimal_token_grpo"])
def test_a_tutorial_is_one_sitting_and_takes_only_the_core(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) < 250
    imports = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
    ]
    ours = {
        ".".join(module.split(".")[:2]) for module in modules if module.startswith("flowgrpo_rc")
    }
    assert ours == {
        "flowgrpo_rc",
        "flowgrpo_rc.core",
        "flowgrpo_rc.correction",
        "flowgrpo_rc.losses",
    }
    assert "from flowgrpo_rc import assets\n" in source


@pytest.mark.parametrize("mode", MODES)
def test_images_get_bluer(mode: str, tmp_path: Path) -> None:
    grid = tmp_path / "blue.png"
    before, after = minimal_flow_grpo.main(["--mode", mode, "--steps", "5", "--out", str(grid)])
    assert after > before + 0.03
    assert grid.is_file()


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft reads it of transformers
@pytest.mark.parametrize("mode", MODES)
def test_sums_get_right(mode: str) -> None:
    before, after = minimal_token_grpo.main(["--mode", mode, "--steps", "8"])
    assert after > before + 0.1


def drawn(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of rollout, old and current policy, and advantages, [6, 4] float64."""
    old, rollout = log_probs(scale)
    now = old + scale * torch.randn(
        6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    advantages = torch.linspace(-2, 2, 6, dtype=torch.float64).unsqueeze(1).expand(-1, 4)
    return rollout, old, now, advantages


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_images_is_that_of_the_package(mode: str) -> None:
    bypass, tutorial = mode == "bypass", minimal_flow_grpo
    rollout, old, now, advantages = drawn(0.02)  # some steps are clipped, some rejected
    correction = RolloutCorrectionConfig(
        bypass_mode=bypass,
        rollout_is=None if bypass else "token",
        rollout_rs="token_k1",
        rollout_rs_threshold=tutorial.BAND,
    )
    config = LossConfig(
        rollout_correction=correction,
        diffusion_loss=DiffusionLossConfig(clip_ratio=tutorial.CLIP_RATIO),
    )
    batch = diffusion_batch(rollout, advantages=advantages, old_log_probs=old)
    if bypass:
        batch = apply_bypass_mode(batch)
    else:
        batch, _ = apply_rollout_correction_to_batch(batch, correction)
        assert not batch.rejection_mask.all()
    expected = gradient_of(lambda leaf: diffusion_loss(config, leaf, batch)[0], now)
    targets = tutorial.make_targets(rollout, None if bypass else old, advantages)
    assert_same(
        gradient_of(lambda leaf: tutorial.policy_loss(leaf, targets, bypass=bypass)[0], now),
        expected,
    )

    def by_steps(leaf: Tensor) -> Tensor:
        parts = [targets.part(torch.arange(6), t) for t in range(4)]
        losses = [
            tutorial.policy_loss(leaf[:, t : t + 1], parts[t], bypass=bypass)[0] for t in range(4)
        ]
        return torch.stack(losses).sum() / 4

    assert_same(gradient_of(by_steps, now), expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_text_is_that_of_the_package(mode: str) -> None:
    bypass, tutorial = mode == "bypass", minimal_token_grpo
    rollout, old, now, advantages = drawn(0.5)
    mask = torch.tensor(
        [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    ).bool()
    correction = RolloutCorrectionConfig(
        bypass_mode=bypass,
        rollout_is=None if bypass else "token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold=tutorial.BAND,
    )
    clip = {
        "clip_ratio_low": tutorial.CLIP_RATIO,
        "clip_ratio_high": tutorial.CLIP_RATIO,
        "clip_ratio_c": None,
    }
    config = LossConfig(rollout_correction=correction, token_loss=TokenLossConfig(**clip))
    batch = token_batch(rollout, mask, advantages=advantages, old_log_probs=old)
    batch = (
        apply_bypass_mode(batch)
        if bypass
        else apply_rollout_correction_to_batch(batch, correction)[0]
    )
    targets = tutorial.make_targets(mask, rollout, None if bypass else old, advantages)
    assert_same(
        gradient_of(lambda leaf: tutorial.policy_loss(leaf, targets, bypass=bypass), now),
        gradient_of(lambda leaf: token_loss(config, leaf, batch)[0], now),
    )


# --- a loss of one's own


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_loss_of_ones_own_has_the_gradient_of_its_formula(kind: str) -> None:
    rollout, old, now, advantages = drawn(0.5)
    kept = torch.ones(6, 4, dtype=torch.bool)
    kept[2, 1] = kept[4, 3] = False
    now[2, 1] = math.inf  # broken, and rejected
    fields = {"advantages": advantages, "old_log_probs": old, "rejection_mask": kept}
    correction = RolloutCorrectionConfig()
    if kind == "images":
        own = DiffusionLossConfig(loss_mode="my_loss:cispo", clip_ratio=0.3)
        config, low, high = LossConfig(rollout_correction=correction, diffusion_loss=own), 0.3, 0.3
        batch, loss, number = diffusion_batch(rollout, **fields), diffusion_loss, kept.numel()
    else:
        own = TokenLossConfig(
            loss_mode="my_loss:cispo_tokens", clip_ratio_low=0.2, clip_ratio_high=0.4
        )
        config, low, high = LossConfig(rollout_correction=correction, token_loss=own), 0.2, 0.4
        batch, loss, number = (
            token_batch(rollout, torch.ones_like(kept), **fields),
            token_loss,
            kept.sum(),
        )
    own.validate()
    _, found = gradient_of(lambda leaf: loss(config, leaf, batch)[0], now)
    expected = -advantages * (now - old).exp().clamp(1 - low, 1 + high) / number
    torch.testing.assert_close(found, torch.where(kept, expected, torch.zeros_like(expected)))


def test_a_loss_of_ones_own_trains_images(train: Train, tmp_path: Path) -> None:
    assert train("actor.diffusion_loss.loss_mode=my_loss:cispo") == 0
    rows = read_rows(tmp_path / "run")
    assert "actor/clip_fraction" in rows[1]
    assert rows[1]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "actor.diffusion_loss.loss_mode=my_loss:nope",
            ["actor.diffusion_loss.loss_mode", "'nope'"],
        ),
        (
            "actor.diffusion_loss.loss_mode=my_lost:cispo",
            ["actor.diffusion_loss.loss_mode", "'my_lost'", "PYTHONPATH"],
        ),
        ("actor.diffusion_loss.loss_mode=grpo", ["flow_dppo", "my_module:function"]),
        ("actor.token_loss.loss_mode=ppo", ["gspo", "my_module:function"]),
        ("model.adapter=my_modell.Chroma", ["model.adapter", "'my_modell'", "PYTHONPATH"]),
        (
            "model.adapter=flux",
            ["StableDiffusion3Pipeline", "model.adapter=flux is for FluxPipeline"],
        ),
        (
            "model.adapter=my_model.Chroma",
            ["StableDiffusion3Pipeline", "model.adapter=my_model.Chroma is for Chroma"],
        ),
    ],
)
def test_wrong_names_say_what_is_allowed(
    override: str, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    command = "train" if override.startswith("actor") else "plan"
    assert main([command, override]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


# --- a model of one's own


@pytest.mark.filterwarnings(
    "ignore:`FluxPosEmbed` is deprecated:FutureWarning"
)  # diffusers' own Chroma
def test_a_model_of_ones_own_is_its_stock_pipeline_and_trains(tmp_path: Path) -> None:
    import my_model

    assert (
        my_model.main(
            ["--out", str(tmp_path), "trainer.total_training_steps=1", "rollout.dtype=fp32"]
        )
        == 0
    )
    assert read_rows(tmp_path / "run")[1]["actor/grad_norm"] > 0
    folder = tmp_path / "checkpoint"
    model = load_model(ModelConfig(path=str(folder), adapter="my_model.Chroma"), CPU)
    assert isinstance(model, my_model.Chroma)
    spec = SamplerSpec(
        height=32,
        width=64,
        num_inference_steps=4,
        guidance_scale=3.5,
        noise_level=0.7,
        sde_type="sde",
        log_prob_convention="gaussian",
        max_sequence_length=16,
        dtype="fp32",
    )
    latents = normal(model.latent_shape(spec), [1, 2])
    positive, negative = (
        model.encode(texts, max_sequence_length=16) for texts in (["a cat", "HELP"], ["blur", ""])
    )
    nothing = torch.empty((2, 0), dtype=torch.int64)
    ours = FlowPolicy(model, model.transformer).rollout(
        latents, positive, negative, spec, nothing, lambda _: latents
    )
    stock = DiffusionPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
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
    batch, _ = sample(model, network, spec, [[0, 1], [1, 2], [0, 1], [1, 2]])
    assert torch.equal(FlowPolicy(model, network).log_probs(batch, 4), batch.rollout_log_probs)


# --- the notebook


def test_the_notebook_compares_a_lora_in_stock_diffusers(tmp_path: Path) -> None:
    path = str(assets.path("tiny_glyph_sd3"))
    config = ModelConfig(path=path, lora_rank=4, lora_alpha=8)
    network = trained_lora(load_model(config, CPU))
    export_lora(
        {name: p.detach() for name, p in lora_parameters(network).items()}, config, tmp_path
    )
    notebook = nbformat.read(EXAMPLES / "compare_lora.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # committed clean
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

"""An exported LoRA in other programs: merged by stock diffusers, and read by ComfyUI's rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file
from support.text_rollouts import lora_state, perturb

from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora

# The layers that ComfyUI maps to its own, by the names of diffusers (comfy/lora.py and utils.py,
# October 2025). Qwen-Image has the same names there.
_ATTENTION = r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)"
_MLP = r"ff(_context)?\.net\.(0\.proj|2)"
_QWEN_MLP = r"(img|txt)_mlp\.net\.(0\.proj|2)"
_SINGLE = r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
COMFY_LAYERS = {
    "StableDiffusion3Pipeline": rf"transformer_blocks\.\d+\.({_ATTENTION}|{_MLP})",
    "FluxPipeline": rf"transformer_blocks\.\d+\.({_ATTENTION}|{_MLP})|{_SINGLE}",
    "QwenImagePipeline": rf"transformer_blocks\.\d+\.({_ATTENTION}|{_QWEN_MLP})",
}


def exported(path: Path, folder: Path, alpha: int) -> tuple[torch.nn.Module, Path]:
    """Returns a network with a LoRA that is not zero, and the file that it was exported to."""
    config = ModelConfig(path=str(path), lora_rank=4, lora_alpha=alpha)
    model = load_model(config, torch.device("cpu"))
    network = add_lora(model, config, seed=0)
    perturb(network)
    return network, export_lora(lora_state(network), config, folder)


@pytest.mark.parametrize("family", list(COMFY_LAYERS))
def test_comfyui_knows_every_key_and_applies_the_same_weights(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """It adds lora_B lora_A to the layer of that name, times alpha / rank only if there is a key
    for alpha.
    """
    network, file = exported(saved(family), tmp_path, alpha=8)
    tensors = load_file(file)
    layers = {re.fullmatch(r"transformer\.(.+)\.lora_[AB]\.weight", key)[1] for key in tensors}
    assert [layer for layer in layers if not re.fullmatch(COMFY_LAYERS[family], layer)] == []
    assert len(tensors) == 2 * len(layers)
    for layer in layers:
        added = network.get_submodule(layer).get_delta_weight("default")
        read = (
            tensors[f"transformer.{layer}.lora_B.weight"]
            @ (tensors[f"transformer.{layer}.lora_A.weight"])
        )
        torch.testing.assert_close(read, added)


def test_a_scale_that_is_no_power_of_two_needs_its_strength_in_comfyui(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It stands in metadata, which ComfyUI does not read."""
    network, file = exported(checkpoint, tmp_path, alpha=6)
    with safe_open(file, framework="pt") as stored:
        assert "transformer.lora_alpha" in stored.metadata()["lora_adapter_metadata"]
    tensors = load_file(file)
    layer = "transformer_blocks.0.attn.to_q"
    read = (
        tensors[f"transformer.{layer}.lora_B.weight"]
        @ (tensors[f"transformer.{layer}.lora_A.weight"])
    )
    added = network.get_submodule(layer).get_delta_weight("default")
    torch.testing.assert_close(6 / 4 * read, added)


@pytest.mark.parametrize("alpha", [8, 6])
def test_a_merged_pipeline_draws_what_the_lora_draws(
    checkpoint: Path, tmp_path: Path, alpha: int
) -> None:
    _, file = exported(checkpoint, tmp_path / "lora", alpha)
    pipe = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    base = picture(pipe)
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    with_lora = picture(pipe)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    pipe.save_pretrained(tmp_path / "merged")
    merged = picture(DiffusionPipeline.from_pretrained(tmp_path / "merged"))
    assert np.abs(with_lora - base).max() > 1e-2
    np.testing.assert_allclose(merged, with_lora, atol=1e-4)


def picture(pipe: DiffusionPipeline) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        "a word",
        height=32,
        width=64,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    return drawn.images[0]

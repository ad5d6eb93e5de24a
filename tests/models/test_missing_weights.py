"""Weights that files lack, hold too much of or in another shape: one line names all of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from support.marks import slow, slow_but
from support.tiny_models import TINY

from flowgrpo_rc.models.architecture import build_architecture, load_tokenizers
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.index import read_index

CPU = torch.device("cpu")
INDEX = "model_index.json"
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")
SPARE = {"tokenizer_3", "text_encoder_3"}  # Stable Diffusion 3 works without T5.
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def settings(folder: Path, change: dict[str, Any], name: str = "config.json") -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def weights(folder: Path) -> dict[str, Path]:
    """Returns the file of weights of each component of a pipeline."""
    return {file.parent.name: file for file in sorted(folder.glob("*/*.safetensors"))}


def load(folder: Path) -> object:
    if (folder / "model_index.json").exists():
        return load_model(ModelConfig(path=str(folder)), CPU).pipeline
    return load_causal_lm(ModelConfig(kind="causal_lm", path=str(folder)), CPU).network


def damage(file: Path, how: str) -> str:
    """Harms a file of weights; returns what has to be told of it."""
    tensors = load_file(file)
    name = max(tensors, key=lambda name: (tensors[name].ndim == 2, name))
    told = f"{file.parent.name}/{file.name}"
    match how:
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
            return f"{told} is no whole file of weights"
        case "pointer":
            file.write_text(POINTER)
            return f"{told} is no whole file of weights"
        case "pickled":
            file.rename(file.with_name("pytorch_model.bin"))
            return rf"{file.parent.name} has no \*\.safetensors; .* `hf download"
        case "quantized":
            settings(file.parent, {"quantization_config": {"quant_method": "of tomorrow"}})
            return rf"{file.parent.name}/config\.json sets quantization_config"
        case "not finite":
            tensors[name] = torch.full_like(tensors[name], torch.nan)
            words = f"{told} holds numbers that are not finite in {name}"
        case "integers":
            tensors[name] = tensors[name].to(torch.int8)
            words = f"{told} holds {name} in integers"
        case "missing":
            del tensors[name]
            words = rf"{told} lacks .*{name}"
        case "unexpected":
            tensors["a_stranger.weight"] = torch.ones(2)
            words = f"{told} holds a_stranger.weight, which no"
        case "misshapen":
            shape = list(tensors[name].shape)
            tensors[name] = torch.ones(shape[0] + 1, *shape[1:])
            words = rf"{name} is .* in {told}, and has to be \{shape}"
    save_file(tensors, file, metadata={"format": "pt"})
    return words


@pytest.mark.parametrize(
    "family",
    ["StableDiffusion3Pipeline", slow("QwenImagePipeline"), slow("WanPipeline+transformer_2")],
)
def test_every_component_of_every_pipeline_has_to_have_its_weights(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    found = weights(saved(family))
    index = read_index(ModelConfig(path=str(saved(family))))
    assert {"transformer", "vae", "text_encoder"} <= set(found) <= set(index)
    for component in found:
        copy = shutil.copytree(saved(family), tmp_path / component)
        words = damage(weights(copy)[component], "missing")
        with pytest.raises(ValueError, match=rf"^model\.path=.*: {words}"):
            load(copy)


@pytest.mark.parametrize(
    "how",
    [
        *("missing", "unexpected", "misshapen", "cut", "pointer", "pickled"),
        *("quantized", "not finite", "integers"),
    ],
)
@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_weights_that_do_not_fit_are_named(
    checkpoint: Path, tiny_lm: Path, tmp_path: Path, library: str, how: str
) -> None:
    copy = shutil.copytree(checkpoint if library == "diffusers" else tiny_lm, tmp_path / "model")
    file = weights(copy)["vae"] if library == "diffusers" else next(copy.glob("*.safetensors"))
    words = damage(file, how)
    # A dot matches no end of a line: the words stand in the first one, and there is no other.
    with pytest.raises(ValueError, match=rf"\Amodel\.path=.*{words}.*\Z"):
        load(copy)


def test_one_of_several_files_is_gone(lm_config: ModelConfig, tmp_path: Path) -> None:
    model = load_causal_lm(lm_config, CPU)
    model.network.save_pretrained(tmp_path, max_shard_size="20KB")
    model.tokenizer.save_pretrained(tmp_path)
    first, *others = sorted(tmp_path.glob("model-*.safetensors"))
    assert others
    load(tmp_path)
    first.unlink()
    with pytest.raises(ValueError, match=rf"^model\.path=.*{first.name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.path=.*'weight_map' is missing"):
        load(tmp_path)


@pytest.mark.parametrize("family", slow_but(["FluxPipeline"], TINY))
def test_parts_of_a_pipeline_that_nobody_understands_are_named(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    config = ModelConfig(path=str(tmp_path / "model"))
    folder = Path(shutil.copytree(saved(family), config.path))
    for name in ("transformer", "vae", "scheduler"):
        file = f"{'scheduler_' * (name == 'scheduler')}config.json"
        settings(folder / name, {"a_setting_of_tomorrow": False}, file)
        model = build_architecture(config)
        settings(folder / name, {"a_setting_of_tomorrow": 2}, file)
        for read in (build_architecture, lambda config: load(folder)):
            with pytest.raises(ValueError, match=rf"of its {name} have a_setting_of_tomorrow=2"):
                read(config)
        shutil.copy(saved(family) / name / file, folder / name / file)
    spec = TINY[family].spec("sde", TINY[family].guided)
    model.check_decoding(spec)
    model.pipeline.vae.register_to_config(shift_factor=None, scaling_factor=None, latents_mean=None)
    if family != "Flux2KleinPipeline":  # whose latents are scaled by tensors
        with pytest.raises(ValueError, match=r"^model\.path: the settings of its vae"):
            model.check_decoding(spec)
    whole = (folder / INDEX).read_text()
    for name in load_tokenizers(config):
        for lost in {name, name.replace("tokenizer", "text_encoder")} - SPARE:
            settings(folder, {lost: [None, None]}, INDEX)
            with pytest.raises(ValueError, match=rf"^model\.path=.* has no {lost}, which a"):
                build_architecture(config)
            (folder / INDEX).write_text(whole)
        for file in VOCABULARY:
            (folder / name / file).unlink(missing_ok=True)
        with pytest.raises(ValueError, match=rf"its {name} has neither tokenizer\.json nor "):
            load_tokenizers(config)
        shutil.copytree(saved(family) / name, folder / name, dirs_exist_ok=True)


def test_weights_of_one_variant_alone_load(checkpoint: Path, tmp_path: Path) -> None:
    """Also where some components have plain weights besides, which come first."""
    files = weights(shutil.copytree(checkpoint, tmp_path / "model"))
    shutil.copy(files["vae"], files["vae"].with_suffix(".fp16.safetensors"))
    for component in files.keys() - {"vae"}:
        files[component].rename(files[component].with_suffix(".fp16.safetensors"))
    found, wanted = (load(folder).components for folder in (tmp_path / "model", checkpoint))
    for component in files:
        torch.testing.assert_close(
            found[component].state_dict(), wanted[component].state_dict(), rtol=0, atol=0
        )


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline"])
def test_a_pipeline_is_described_as_diffusers_describes_it(
    saved: Callable[[str], Path], name: str
) -> None:
    """An engine of its own loads it again from where it came from."""
    folder = str(saved(name))
    found = load_model(ModelConfig(path=folder), CPU).pipeline
    assert found.name_or_path == folder
    assert found.config == DiffusionPipeline.from_pretrained(folder).config

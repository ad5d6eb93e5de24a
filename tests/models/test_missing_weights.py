"""Weights that files lack, hold too much of or in another shape: one line names all of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from support.tiny_models import TINY
from support.tiny_rewards import save_clip
from transformers import CLIPModel

from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.index import read_index
from flowgrpo_rc.rewards.backbones.checkpoint import load_pretrained

CPU = torch.device("cpu")


def parts(folder: Path) -> dict[str, Path]:
    """Returns the file of weights of each component of a pipeline."""
    return {file.parent.name: file for file in sorted(folder.glob("*/*.safetensors"))}


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor], str], None]) -> str:
    """Changes the tensors of a file at one name, which is returned."""
    tensors = load_file(file)
    name = max(tensors, key=lambda name: (tensors[name].ndim == 2, name))
    change(tensors, name)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def add(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors["a_stranger.weight"] = torch.ones(2)


def widen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.ones(len(tensors[name]) + 1, *tensors[name].shape[1:])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def point(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")


def pickle(file: Path) -> None:
    file.rename(file.with_name("pytorch_model.bin"))


@pytest.mark.parametrize("family", [name for name in TINY if name != "WanPipeline"])
def test_every_component_of_every_pipeline_has_to_have_its_weights(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    for package in TINY[family].packages:
        pytest.importorskip(package)
    found = parts(saved(family))
    index = read_index(ModelConfig(path=str(saved(family))))
    assert {"transformer", "vae", "text_encoder"} <= set(found) <= set(index)
    for component, file in found.items():
        copy = tmp_path / component
        shutil.copytree(saved(family), copy)
        name = rewrite(copy / component / file.name, drop)
        words = rf"^model\.path=.*: {component}/{file.name} lacks .*{name}"
        with pytest.raises(ValueError, match=words):
            load_model(ModelConfig(path=str(copy)), CPU)


def component(name: str) -> Callable[[Path, Path, Path], tuple[Path, Callable[[], Any]]]:
    def copied(pipeline: Path, text: Path, root: Path) -> tuple[Path, Callable[[], Any]]:
        shutil.copytree(pipeline, root / "model")
        load = lambda: load_model(ModelConfig(path=str(root / "model")), CPU)  # noqa: E731
        return parts(root / "model")[name], load

    return copied


def language_model(pipeline: Path, text: Path, root: Path) -> tuple[Path, Callable[[], Any]]:
    shutil.copytree(text, root / "model")
    config = ModelConfig(kind="causal_lm", path=str(root / "model"))
    return next((root / "model").glob("*.safetensors")), lambda: load_causal_lm(config, CPU)


def clip(pipeline: Path, text: Path, root: Path) -> tuple[Path, Callable[[], Any]]:
    folder = save_clip(root / "model")
    load = lambda: load_pretrained(CLIPModel, str(folder), device="cpu", dtype="fp32")  # noqa: E731
    return folder / "model.safetensors", load


PLACES = {
    "transformer": component("transformer"),
    "vae": component("vae"),
    "text_encoder_3": component("text_encoder_3"),
    "language model": language_model,
    "reward": clip,
}
DAMAGE: dict[str, tuple[Any, str]] = {
    "missing": (drop, "lacks "),
    "unexpected": (add, "holds a_stranger.weight, which no"),
    "misshapen": (widen, "has to be"),
    "cut": (cut, "is no whole file of weights"),
    "pointer": (point, "is no whole file of weights"),
    "pickled": (pickle, "safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_do_not_fit_are_named(
    checkpoint: Path, tiny_lm: Path, tmp_path: Path, place: str, damage: str
) -> None:
    file, load = PLACES[place](checkpoint, tiny_lm, tmp_path)
    change, words = DAMAGE[damage]
    name = ""
    if change in (drop, add, widen):
        name = rewrite(file, change) if change is not add else rewrite(file, add) and ""
    else:
        change(file)
    with pytest.raises(ValueError, match="path=") as refused:
        load()
    told = str(refused.value)
    assert told.startswith(("model.path=", "path="))
    assert words in told
    assert name in told
    assert damage == "pickled" or file.name in told
    assert file.parent.name in told
    assert "\n" not in told


def test_one_of_several_files_is_gone(tiny_lm: Path, tmp_path: Path) -> None:
    config = ModelConfig(kind="causal_lm", path=str(tmp_path))
    model = load_causal_lm(ModelConfig(kind="causal_lm", path=str(tiny_lm)), CPU)
    model.network.save_pretrained(tmp_path, max_shard_size="20KB")
    model.tokenizer.save_pretrained(tmp_path)
    first, *others = sorted(tmp_path.glob("model-*.safetensors"))
    assert others
    load_causal_lm(config, CPU)
    first.unlink()
    with pytest.raises(ValueError, match=rf"^model\.path=.*{first.name}"):
        load_causal_lm(config, CPU)


def test_weights_of_one_variant_alone_load(checkpoint: Path, tiny_lm: Path, tmp_path: Path) -> None:
    """Also where some components have plain weights besides, which come first."""
    shutil.copytree(checkpoint, tmp_path / "image")
    shutil.copytree(tiny_lm, tmp_path / "text")
    plain = parts(tmp_path / "image")
    for file in plain.values():
        if file.parent.name != "vae":
            file.rename(file.with_suffix(".fp16.safetensors"))
    shutil.copy(plain["vae"], plain["vae"].with_suffix(".fp16.safetensors"))
    text = next((tmp_path / "text").glob("*.safetensors"))
    text.rename(text.with_suffix(".fp16.safetensors"))
    found = load_model(ModelConfig(path=str(tmp_path / "image")), CPU).pipeline.components
    wanted = load_model(ModelConfig(path=str(checkpoint)), CPU).pipeline.components
    pairs = [(found[name], wanted[name]) for name in plain]
    configs = [
        ModelConfig(kind="causal_lm", path=str(path)) for path in (tmp_path / "text", tiny_lm)
    ]
    pairs.append(tuple(load_causal_lm(config, CPU).network for config in configs))
    for one, other in pairs:
        for (name, here), there in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(here, there), name


@pytest.mark.parametrize(
    "name", ["FluxPipeline", "QwenImagePipeline", "SanaPipeline", "WanPipeline"]
)
def test_a_pipeline_is_described_as_diffusers_describes_it(
    saved: Callable[[str], Path], name: str
) -> None:
    """An engine of its own loads it again from where it came from."""
    folder = str(saved(name))
    found = load_model(ModelConfig(path=folder), CPU).pipeline
    assert found.name_or_path == folder
    assert found.config == DiffusionPipeline.from_pretrained(folder).config

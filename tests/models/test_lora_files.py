"""LoRA files of others mean what stock diffusers and peft compute with them, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.subjects import with_own_network
from support.text_rollouts import lora_state
from transformers import AutoModelForCausalLM

from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora

# peft asks for this attribute.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

CPU = torch.device("cpu")
METADATA = "lora_adapter_metadata"
TARGETS = {"image": ["to_q", "to_v"], "text": ["q_proj", "v_proj"]}
UNDERSTOOD = {
    "ranks": {"rank_pattern": {"(to_q|q_proj)": 2}},
    "alphas": {"alpha_pattern": {r".*\.0\..*(to_v|v_proj)": 3}},
    "all three": {
        "use_rslora": True,
        "rank_pattern": {"(to_v|v_proj)": 3},
        "alpha_pattern": {"(to_v|v_proj)": 5},
    },
}


def deltas(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns what the LoRA adds to each layer, by the layer's name."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight(module.active_adapters[0])
        for name, module in network.named_modules()
        if isinstance(module, LoraLayer)
    }


def assert_same(ours: torch.nn.Module, stock: torch.nn.Module) -> None:
    found, wanted = deltas(ours), deltas(stock)
    assert found.keys() == wanted.keys()
    assert all(delta.abs().max() > 0 for delta in wanted.values())
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=2e-6)


@cache
def loaded(base: Path) -> FlowModel:
    return load_model(ModelConfig(path=str(base)), CPU)


def image_model(base: Path) -> FlowModel:
    return with_own_network(loaded(base))


def fill(network: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)


def image_file(base: Path, folder: Path, **settings: Any) -> None:
    """Writes a LoRA as stock diffusers does."""
    pipeline = image_model(base).pipeline
    network = pipeline.transformer
    targets = TARGETS["image"]
    network.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings))
    fill(network)
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(network),
        **_collate_lora_metadata({"transformer": network}),
    )


def text_files(base: Path, folder: Path, **settings: Any) -> None:
    """Writes a LoRA as stock peft does."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS["text"], **settings)
    network = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    fill(network)
    network.save_pretrained(folder)


def ours(kind: str, base: Path, folder: Path, **settings: Any) -> tuple[Any, ModelConfig]:
    options = {"lora_rank": 4, "lora_alpha": 6, "lora_path": str(folder)} | settings
    family = {"image": "diffusion", "text": "causal_lm"}[kind]
    config = ModelConfig(kind=family, path=str(base), target_modules=TARGETS[kind], **options)
    model = image_model(base) if kind == "image" else load_causal_lm(config, CPU)
    return add_lora(model, config, seed=0), config


def stock(kind: str, base: Path, folder: Path) -> Any:
    if kind == "text":
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    pipeline = image_model(base).pipeline
    pipeline.load_lora_weights(folder)
    return pipeline.transformer


def redescribe(kind: str, folder: Path, change: Mapping[str, Any]) -> None:
    """Changes the settings that stand with the tensors."""
    if kind == "text":
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        return
    path = next(folder.glob("*.safetensors"))
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()[METADATA])
    described |= {name if "." in name else f"transformer.{name}": v for name, v in change.items()}
    save_file(load_file(path), path, metadata={"format": "pt", METADATA: json.dumps(described)})


@pytest.mark.parametrize("settings", UNDERSTOOD.values(), ids=list(UNDERSTOOD))
@pytest.mark.parametrize("family", ["StableDiffusion3Pipeline", "text"])
def test_ranks_and_strengths_are_those_of_stock_loaders_and_go_on_in_the_export(
    saved: Callable[[str], Path],
    tiny_lm: Path,
    tmp_path: Path,
    family: str,
    settings: Mapping[str, Any],
) -> None:
    kind = "text" if family == "text" else "image"
    base = tiny_lm if kind == "text" else saved(family)
    write = text_files if kind == "text" else image_file
    write(base, tmp_path / "theirs", **settings)
    network, config = ours(kind, base, tmp_path / "theirs")
    assert_same(network, stock(kind, base, tmp_path / "theirs"))
    export_lora(lora_state(network), config, tmp_path / "ours")
    assert_same(network, stock(kind, base, tmp_path / "ours"))
    with pytest.raises(ValueError, match=r"model\.lora_rank=8: the largest rank in .* is 4"):
        ours(kind, base, tmp_path / "theirs", lora_rank=8)


def test_a_file_without_settings_has_strength_1_at_every_rank(
    checkpoint: Path, tmp_path: Path
) -> None:
    image_file(checkpoint, tmp_path, rank_pattern={"to_q": 3})
    path = next(tmp_path.glob("*.safetensors"))
    save_file(load_file(path), path, metadata={"format": "pt"})
    network, _ = ours("image", checkpoint, tmp_path)
    assert_same(network, stock("image", checkpoint, tmp_path))
    trained = {name: p for name, p in network.named_parameters() if ".to_q.lora_" in name}
    # The rank that the file leaves over can learn: one of its factors is not zero.
    assert all(p[3:].abs().max() > 0 for name, p in trained.items() if "lora_A" in name)
    assert all(p[:, 3:].abs().max() == 0 for name, p in trained.items() if "lora_B" in name)


REFUSED = {
    "init_lora_weights": "pissa",
    "use_dora": True,
    "use_qalora": True,
    "bias": "all",
    "layer_replication": [[0, 1], [0, 2]],
    "target_parameters": ["experts.gate_up_proj"],
    "modules_to_save": ["lm_head"],
    "alora_invocation_tokens": [1, 2],
    "trainable_token_indices": [3],
    "lora_bias": True,
    "peft_type": "LOHA",
    "kasa_config": {"beta": 1e-4},
    "a_setting_of_tomorrow": 2,
}


UNREADABLE = {"rank_pattern": None, "alpha_pattern": {"(": 3}, "target_modules": 5}


@pytest.mark.parametrize("kind", ["image", "text"])
def test_other_settings_are_refused_by_file_and_name(
    checkpoint: Path, tiny_lm: Path, tmp_path: Path, kind: str
) -> None:
    base = tiny_lm if kind == "text" else checkpoint
    write = text_files if kind == "text" else image_file
    file = "adapter_config.json" if kind == "text" else "pytorch_lora_weights.safetensors"
    write(base, tmp_path / "plain")
    for value in ("olora", "corda", "loftq", "lora_ga", "pissa_niter_4", "unheard_of"):
        _refused(kind, base, tmp_path, {"init_lora_weights": value}, file)
    for name, value in (REFUSED | UNREADABLE).items():
        _refused(kind, base, tmp_path, {name: value}, file)
    for change in ({"target_modules": TARGETS[kind][:1]}, {"exclude_modules": TARGETS[kind][:1]}):
        _refused(kind, base, tmp_path, change, file)
    if kind == "image":
        _refused(kind, base, tmp_path, {"text_encoder.r": 4}, file)
    accepted = {"lora_dropout": 0.1, "another_setting_of_tomorrow": None, "layers_pattern": []}
    redescribe(kind, tmp_path / "plain", accepted | {"init_lora_weights": "eva"})
    ours(kind, base, tmp_path / "plain")


def _refused(kind: str, base: Path, root: Path, change: Mapping[str, Any], file: str) -> None:
    copy = root / f"{next(iter(change))}_{next(iter(change.values()))}".replace("/", "_")[:60]
    copy.mkdir()
    for path in (root / "plain").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    redescribe(kind, copy, change)
    name = next(iter(change))
    with pytest.raises(ValueError, match=rf"model\.lora_path=.*{file}.*{name}"):
        ours(kind, base, copy)


LAYER = "transformer.transformer_blocks.0.attn.to_q"
TENSORS = {
    "another adapter": ({f"{LAYER}.hada_w1_a": torch.ones(4, 4)}, "hada_w1_a"),
    "no matrix": ({f"{LAYER}.lora_A.weight": torch.tensor(1.0)}, r"lora_A\.weight is \(\)"),
    "no rank": (
        {
            f"{LAYER}.lora_A.weight": torch.ones(0, 128),
            f"{LAYER}.lora_B.weight": torch.ones(128, 0),
        },
        r"lora_A\.weight is \(0, 128\), so it has no rank",
    ),
    "whole numbers": (
        {f"{LAYER}.lora_A.weight": torch.ones(4, 128, dtype=torch.int8)},
        r"lora_A\.weight holds .*int8",
    ),
    "kohya": ({"lora_unet_a.lora_down.weight": torch.ones(4, 4)}, "begin with transformer"),
}


@pytest.mark.parametrize(("more", "words"), TENSORS.values(), ids=list(TENSORS))
def test_tensors_of_no_plain_lora_are_named(
    checkpoint: Path, tmp_path: Path, more: Mapping[str, torch.Tensor], words: str
) -> None:
    image_file(checkpoint, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    save_file(load_file(path) | dict(more), path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^model\.lora_path=.*{words}"):
        ours("image", checkpoint, tmp_path)

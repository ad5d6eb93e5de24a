"""LoRA on the transformer (arXiv 2106.09685) through peft: adding, reading, exporting, starting from an export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.models.base import FlowModel, ModelConfig

EXPORT_NAME = "pytorch_lora_weights.safetensors"
_ADAPTER = "default"


def add_lora(model: FlowModel, config: ModelConfig, seed: int) -> nn.Module:
    """Put a fresh LoRA (or that of `config.lora_path`) on the model's transformer; only its fp32 tensors train.

    The initial values follow from `seed` alone. Raises ValueError if a target module is not there.
    """
    transformer = model.transformer
    targets = list(config.target_modules or model.default_target_modules)
    names = [name for name, _ in transformer.named_modules()]
    missing = [target for target in targets if not any(n == target or n.endswith("." + target) for n in names)]
    if missing:
        raise ValueError(f"model.target_modules: the transformer has no module that ends in {', '.join(missing)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        transformer.add_adapter(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                init_lora_weights="gaussian" if config.lora_init == "gaussian" else True,
                target_modules=targets,
            ),
            adapter_name=_ADAPTER,
        )
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if config.lora_path is not None:
        load_export(transformer, config)
    return transformer


def lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable tensors by name, in a fixed order."""
    return {name: p for name, p in sorted(transformer.named_parameters()) if p.requires_grad}


@contextmanager
def reference_policy(transformer: Any) -> Iterator[None]:
    """The base model for the duration: the adapter is off."""
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()


def export_lora(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """Write LoRA tensors for stock diffusers (`pipe.load_lora_weights(folder)`) and tools that read its keys.

    alpha / rank is folded into lora_B, since loaders take a file without adapter metadata at strength 1. That is
    exact where the scale is a power of two. Otherwise the tensors stay as they are and the file carries the
    metadata from which diffusers restores the scale, so that the images are bit-equal in every case.
    """
    scale = config.lora_alpha / config.lora_rank
    folds = math.frexp(scale)[0] == 0.5
    tensors = {}
    for name, tensor in state.items():
        folded = tensor * scale if folds and ".lora_B." in name else tensor
        tensors[f"transformer.{name.replace(f'.{_ADAPTER}.', '.')}"] = folded.detach().cpu().contiguous()
    metadata = {"format": "pt"}
    if not folds:
        metadata[LORA_ADAPTER_METADATA_KEY] = _adapter_metadata(config, state)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (EXPORT_NAME + ".partial")
    save_file(tensors, partial, metadata=metadata)
    return partial.replace(folder / EXPORT_NAME)


def load_export(transformer: nn.Module, config: ModelConfig) -> None:
    """Start from an exported LoRA of the same rank and target modules, at the strength that it was exported with.

    ValueError names the first difference.
    """
    path = Path(config.lora_path or "").expanduser()
    path = path / EXPORT_NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model.lora_path={config.lora_path}: there is no {EXPORT_NAME}")
    with safe_open(path, framework="pt") as file:
        described = json.loads((file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    stored_scale = described["transformer.lora_alpha"] / described["transformer.r"] if described else 1.0
    factor = stored_scale / (config.lora_alpha / config.lora_rank)
    parameters = lora_parameters(transformer)
    expected = {f"transformer.{name.replace(f'.{_ADAPTER}.', '.')}": p for name, p in parameters.items()}
    if stored.keys() != expected.keys():
        different = sorted(stored.keys() ^ expected.keys())
        raise ValueError(
            f"model.lora_path={config.lora_path} has other modules than model.target_modules: {len(different)} keys "
            f"differ, the first is {different[0]}"
        )
    for key, parameter in expected.items():
        if stored[key].shape != parameter.shape:
            raise ValueError(
                f"model.lora_path={config.lora_path}: {key} is {tuple(stored[key].shape)}, model.lora_rank="
                f"{config.lora_rank} needs {tuple(parameter.shape)}"
            )
        value = stored[key].float()
        parameter.data.copy_(value * factor if ".lora_B." in key else value)


def _adapter_metadata(config: ModelConfig, state: Mapping[str, Tensor]) -> str:
    """peft's description of the adapter, as diffusers stores it beside the tensors."""
    modules = sorted({name.split(".lora_")[0] for name in state})
    fields = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": modules}
    return json.dumps({f"transformer.{key}": value for key, value in fields.items()}, sort_keys=True)

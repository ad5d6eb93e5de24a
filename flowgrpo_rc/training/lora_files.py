"""LoRA files that other software reads: diffusers' format for image models, peft's for language models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.peft_files import CONFIG_NAME, TENSORS_NAME, peft_files
from flowgrpo_rc.training.tracking import write_atomic

ADAPTER = "default"
EXPORT_NAMES = {"diffusion": "pytorch_lora_weights.safetensors", "causal_lm": TENSORS_NAME}
_PREFIXES = {"diffusion": "transformer.", "causal_lm": "base_model.model."}
# Settings of peft that change what the tensors mean; nothing here computes with them.
_UNKNOWN_TO_US = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")


def export_lora(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """Write LoRA tensors for the software that samples from such a model; returns the file with the tensors.

    model.kind=diffusion: `pipe.load_lora_weights(folder)` of stock diffusers, and tools that read its keys.
    model.kind=causal_lm: `PeftModel.from_pretrained(base, folder)` of stock peft, and vLLM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return (_export_for_peft if config.kind == "causal_lm" else _export_for_diffusers)(state, config, folder)


def load_export(network: nn.Module, config: ModelConfig) -> None:
    """Start from an exported LoRA of the same rank and target modules, at the strength that it was exported with.

    ValueError names the first difference.
    """
    name = EXPORT_NAMES[config.kind]
    path = Path(config.lora_path or "").expanduser()
    path = path / name if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model.lora_path={config.lora_path}: there is no {name}")
    with safe_open(path, framework="pt") as file:
        described = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}")
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    scale = _peft_scale(path, config) if config.kind == "causal_lm" else _diffusers_scale(described)
    factor = scale / (config.lora_alpha / config.lora_rank)
    expected = {_key(name, config): p for name, p in network.named_parameters() if p.requires_grad}
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
        value = stored[key].to(parameter.dtype)
        parameter.data.copy_(value * factor if ".lora_B." in key else value)


def _export_for_diffusers(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """alpha / rank is folded into lora_B, since loaders take a file without adapter metadata at strength 1.

    That is exact where the scale is a power of two. Otherwise the tensors stay as they are and the file carries the
    metadata from which diffusers restores the scale, so that the images are bit-equal in every case.
    """
    scale = config.lora_alpha / config.lora_rank
    folds = math.frexp(scale)[0] == 0.5
    tensors = {name: tensor * scale if folds and ".lora_B." in name else tensor for name, tensor in state.items()}
    metadata = {} if folds else {LORA_ADAPTER_METADATA_KEY: _adapter_metadata(config, state)}
    return _write(tensors, config, folder, metadata)


def _export_for_peft(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """The tensors as they are; peft's own description of the adapter holds rank and alpha."""
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in state}
    files = peft_files(
        state,
        adapter=ADAPTER,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=sorted(config.target_modules or layers),
        base=config.path,
    )
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder / TENSORS_NAME


def _write(tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path, metadata: Mapping[str, str]) -> Path:
    content = {_key(name, config): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path = folder / EXPORT_NAMES[config.kind]
    write_atomic(path, save(content, metadata={"format": "pt", **metadata}))
    return path


def _key(name: str, config: ModelConfig) -> str:
    """A parameter's name in the file."""
    return f"{_PREFIXES[config.kind]}{name.replace(f'.{ADAPTER}.', '.')}"


def _adapter_metadata(config: ModelConfig, state: Mapping[str, Tensor]) -> str:
    """peft's description of the adapter, as diffusers stores it beside the tensors."""
    modules = sorted({name.split(".lora_")[0] for name in state})
    fields = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": modules}
    return json.dumps({f"transformer.{key}": value for key, value in fields.items()}, sort_keys=True)


def _diffusers_scale(metadata: str) -> float:
    described = json.loads(metadata)
    return described["transformer.lora_alpha"] / described["transformer.r"] if described else 1.0


def _peft_scale(path: Path, config: ModelConfig) -> float:
    """alpha / rank of the description beside the tensors."""
    file = path.parent / CONFIG_NAME
    if not file.is_file():
        raise ValueError(f"model.lora_path={config.lora_path}: there is no {CONFIG_NAME} beside {path.name}")
    described = json.loads(file.read_text(encoding="utf-8"))
    unknown = [name for name in _UNKNOWN_TO_US if described.get(name)]
    if unknown:
        raise ValueError(
            f"model.lora_path={config.lora_path}: {CONFIG_NAME} sets {', '.join(unknown)}; only a plain LoRA can "
            "be trained further"
        )
    return float(described["lora_alpha"] / described["r"])

"""The files that a LoRA is exported to: their names and keys, and loading one to train it further.

Diffusion models have one file in the format of diffusers, language models two files in the format
of peft, which transformers and vLLM read. `flowgrpo_rc.exports` writes them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.networks import FIRST, transformers
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping

# The LoRA's name in the parameters of a network, `....lora_A.default.weight`. Files leave it out.
ADAPTER = "default"
CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
EXPORT_NAMES = {"diffusion": "pytorch_lora_weights.safetensors", "causal_lm": TENSORS_NAME}
# A second transformer has a file of its own, in a folder with the component's name: loaders of
# diffusers read one transformer from a file, and expect its keys to begin with `transformer.`.
_PREFIXES = {"diffusion": "transformer.", "causal_lm": "base_model.model."}
# Settings of peft come from anywhere, so each is read here, or has no effect on what the tensors
# add, or has to be peft's default.
_DEFAULTS = LoraConfig().to_dict()
_STRENGTH = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_MODULES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_NO_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("eva_config", "fan_in_fan_out", "lora_dropout", "runtime_config", "task_type"),
)
# Ways to begin that leave the base model as it is. All others belong to changed weights.
_SAME_BASE = (True, False, "gaussian", "eva", "mica", "orthogonal")


def export_name(config: ModelConfig, component: str) -> str:
    """Returns the place of a transformer's file in the folder of an export."""
    name = EXPORT_NAMES[config.kind]
    return name if component == FIRST else f"{component}/{name}"


def load_export(network: nn.Module, config: ModelConfig) -> None:
    """Copies the LoRA of `lora_path`, at its own strength. ValueError names what does not fit."""
    folder = Path(config.lora_path or "").expanduser()
    files = {export_name(config, name): part for name, part in transformers(network).items()}
    if len(files) > 1 and folder.is_file():
        raise ValueError(
            f"model.lora_path={config.lora_path} is the LoRA of one transformer, and the model has "
            f"{len(files)}: give the folder with {', '.join(files)}"
        )
    for file, transformer in files.items():
        path = folder / file if folder.is_dir() else folder
        if not path.is_file():
            raise ValueError(f"model.lora_path={config.lora_path}: there is no {file}")
        _load_file(path, transformer, config)


def _load_file(path: Path, network: nn.Module, config: ModelConfig) -> None:
    """Copies the LoRA of one file into one transformer, or into a language model."""
    kind = config.kind
    where = f"model.lora_path={config.lora_path}"
    with blaming(where):
        stored, metadata = _read(path, _PREFIXES[kind])
    ranks = {_module(key, kind): len(x) for key, x in stored.items() if ".lora_A." in key}
    with blaming(f"{where}: {CONFIG_NAME if kind == 'causal_lm' else path.name}"):
        settings = _settings_beside(path) if kind == "causal_lm" else _settings_in(metadata)
        # Without settings, diffusers adds the tensors as they are.
        scales = dict.fromkeys(ranks, 1.0) if settings is None else _strengths(settings, ranks)
    trained = {file_key(name, kind): p for name, p in network.named_parameters() if p.requires_grad}
    if stored.keys() != trained.keys():
        different = sorted(stored.keys() ^ trained.keys())
        raise ValueError(
            f"{where} has other modules than model.target_modules: "
            f"{len(different)} keys differ, the first is {different[0]}"
        )
    largest = max(ranks.values())
    if largest != config.lora_rank:
        raise ValueError(
            f"model.lora_rank={config.lora_rank}: the largest rank in {where} is {largest}, and "
            "has to be the same"
        )
    for key, parameter in trained.items():
        module = _module(key, kind)
        # A rank below that of the network leaves the rest as it began: B is 0 there.
        rows = slice(ranks[module])
        place = parameter.data[rows] if ".lora_A." in key else parameter.data[:, rows]
        value = stored[key].to(parameter.dtype)
        if value.shape != place.shape:
            raise ValueError(
                f"{where}: {key} is {tuple(value.shape)}, the model needs {tuple(place.shape)}"
            )
        # Networks scale by alpha / rank of the configuration, so B takes up the difference.
        factor = scales[module] / (config.lora_alpha / config.lora_rank)
        place.copy_(value * factor if ".lora_B." in key else value)


def _read(path: Path, prefix: str) -> tuple[dict[str, Tensor], str | None]:
    """Returns the tensors of a file, which are checked, and diffusers' description of them."""
    # Also where a network without weights is built, the file's tensors have values.
    with torch.device("cpu"), safe_open(path, framework="pt") as file:
        description = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    for key, tensor in stored.items():
        if not key.startswith(prefix):
            fault = f"it holds {key}, and its keys have to begin with {prefix}"
        elif ".lora_A." in key and (tensor.ndim < 2 or not len(tensor)):
            fault = f"{key} is {tuple(tensor.shape)}, so it has no rank"
        elif not (tensor.is_floating_point() and tensor.float().isfinite().all()):
            fault = f"{key} holds numbers that are not finite, or {tensor.dtype}"
        else:
            continue
        raise ValueError(fault)
    return stored, description


def file_key(name: str, kind: str) -> str:
    """Returns the name in the file of a parameter of a transformer or a language model."""
    return f"{_PREFIXES[kind]}{name.replace(f'.{ADAPTER}.', '.')}"


def _module(key: str, kind: str) -> str:
    """Returns the name in the network of the module that a tensor of a file belongs to."""
    return key.removeprefix(_PREFIXES[kind]).split(".lora_")[0]


def peft_files(
    state: Mapping[str, Tensor], *, rank: int, alpha: int, target_modules: Sequence[str], base: str
) -> dict[str, bytes]:
    """Makes both files of a LoRA, name -> content, of tensors by their names in the network."""
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    # peft holds a set, which has no order; equal runs shall write equal files.
    settings["target_modules"] = sorted(settings["target_modules"])
    tensors = {
        file_key(name, "causal_lm"): tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    return {
        CONFIG_NAME: (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode(),
        TENSORS_NAME: save(tensors, metadata={"format": "pt"}),
    }


def _settings_in(metadata: str | None) -> dict[str, object] | None:
    """Returns the settings in diffusers' metadata; None for a file without them."""
    if not metadata:
        return None
    prefix = _PREFIXES["diffusion"]
    settings = parse_mapping(metadata)
    for name in settings:
        if not name.startswith(prefix):
            raise ValueError(f"it sets {name}; only the LoRA of a transformer can be trained")
    return {name.removeprefix(prefix): value for name, value in settings.items()}


def _settings_beside(path: Path) -> dict[str, object]:
    """Returns the settings that peft keeps in a file beside the tensors."""
    file = path.parent / CONFIG_NAME
    if not file.is_file():
        raise ValueError(f"there is no {CONFIG_NAME} beside {path.name}")
    return read_mapping(file)


def _strengths(stated: Mapping[str, object], ranks: Mapping[str, int]) -> dict[str, float]:
    """Computes the strength of each module as peft does.

        alpha / r,  or alpha / sqrt(r) with use_rslora

    Args:
      stated: the settings, as `LoraConfig` names them; what is not there is peft's default.
      ranks: the inner dimension of each module's tensors, by its name in the network.

    Raises:
      ValueError: a setting is not known, or contradicts the tensors.
    """
    for name, value in stated.items():
        default = _DEFAULTS.get(name)
        # A setting that peft did not have when the file was written, or has dropped, is off.
        is_off = value in (None, False, [], {}) and default in (None, False, [], {})
        known = name in (*_STRENGTH, *_MODULES, *_NO_EFFECT) or value == default or is_off
        if name == "init_lora_weights":
            known = value in _SAME_BASE
        if not known:
            raise ValueError(
                f"it sets {name}={value!r}; only a plain LoRA of an unchanged base model can be "
                f"trained further (peft's default: {default!r})"
            )
    settings: dict[str, Any] = _DEFAULTS | dict(stated)
    left_out = []
    with blaming(", ".join(_MODULES)):
        if settings["target_modules"] not in (None, "all-linear"):
            chosen = LoraConfig(**{name: settings[name] for name in _MODULES})
            left_out = [name for name in ranks if not check_target_module_exists(chosen, name)]
    for module in left_out:
        raise ValueError(f"it holds tensors of {module}, which {', '.join(_MODULES)} leave out")
    scales = {}
    for module, rank in ranks.items():
        given_rank = _of_module(settings, "r", "rank_pattern", module)
        alpha = _of_module(settings, "lora_alpha", "alpha_pattern", module)
        is_number = isinstance(alpha, int | float) and math.isfinite(alpha)
        if given_rank != rank or not is_number:
            raise ValueError(
                f"r and rank_pattern give {module} rank {given_rank}, its tensors {rank}; "
                f"lora_alpha and alpha_pattern give it alpha {alpha}"
            )
        scales[module] = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
    return scales


def _of_module(settings: Mapping[str, Any], name: str, pattern: str, module: str) -> Any:
    """Returns a module's own value by the first pattern that fits it, or that of all modules."""
    patterns = settings[pattern]
    with blaming(f"{pattern}={patterns!r}"):
        return patterns.get(get_pattern_key(patterns.keys(), module), settings[name])

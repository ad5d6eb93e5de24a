"""The components of a pipeline, by what its model_index.json says of them."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.models.index import components_in, read_index
from flowgrpo_rc.reading import blaming

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_pipeline(config: ModelConfig, make: Callable[[str, Any], object]) -> DiffusionPipeline:
    """Builds a pipeline of what `make` returns for the name and the class of each component."""
    index = read_index(config)
    parts = {name: value for name, value in index.items() if not name.startswith("_")}
    parts |= {name: None for name, value in parts.items() if isinstance(value, list)}
    for name, (library, class_name) in components_in(index).items():
        parts[name] = make(name, component_class(config, name, library, class_name))
    with blaming(f"model.path={config.path}: {INDEX_FILES['diffusion']}"):
        return getattr(diffusers, str(index["_class_name"]))(**parts)


def component_class(config: ModelConfig, name: str, library: str, class_name: str) -> Any:
    """Returns the class of a component by model_index.json; ValueError if it cannot be read."""
    cls: Any = getattr(import_module(library), class_name, None)
    is_class = inspect.isclass(cls)  # told apart, so that the type checker asks nothing of it
    if not is_class:
        raise ValueError(
            f"model.path={config.path}: its {name} is {class_name}, and this installation's "
            f"{library} has no class of this name"
        )
    if issubclass(cls, diffusers.ConfigMixin):
        where = f"model.path={config.path}: the settings of its {name}"
        with blaming(where):
            settings = cls.load_config(config.location(), subfolder=name)
            unknown = cls.extract_init_dict(settings)[1]
        for key, value in unknown.items():  # which diffusers would ignore
            if value not in (None, False, [], {}):
                raise ValueError(f"{where} have {key}={value!r}, which no {class_name} here knows")
    return cls


def component_dtype(
    config: ModelConfig, name: str, device: torch.device, *, stock_in_bf16: bool
) -> torch.dtype:
    """Returns the precision of a component with weights.

    That of the VAE is bf16 on a card where the stock pipeline in bf16 has its VAE so; else fp32,
    since SD3's overflows in half precision and a CPU convolves faster in fp32.
    """
    if name != "vae":
        return DTYPES[config.dtype]
    in_bf16 = stock_in_bf16 and config.dtype == "bf16" and device.type != "cpu"
    return torch.bfloat16 if in_bf16 else torch.float32

"""A pipeline by its model_index.json, and small files of a model, local or on the Hub."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.reading import ANSWER_S, ask_hub, asking_hub, blaming, read_mapping

# How model_index.json writes a component that is not there.
ABSENT = [None, None]
# Where the classes of components come from. Any other module would be imported by its mere name.
_LIBRARIES = ("diffusers", "transformers")
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def read_index(config: ModelConfig) -> dict[str, object]:
    """Reads model_index.json. ValueError if it cannot be read, or names code of its own."""
    where = f"model.path={config.path}"
    file = model_file(config.path, INDEX_FILES["diffusion"])
    with blaming(f"{where} as a diffusers pipeline"):
        index = read_mapping(file)
    for name, value in index.items():
        is_class = isinstance(value, list) and [type(word) for word in value] == [str, str]
        is_setting = isinstance(value, bool | int | float | None) or value == ABSENT
        libraries = " and ".join(_LIBRARIES)
        refuse(
            (
                is_class and value[0] not in _LIBRARIES,
                f"and only classes of {libraries} are loaded: code of a model is never run",
            ),
            (
                not (is_class or is_setting or name.startswith("_")),
                f"which is neither a library and a class, nor a setting, in {file.name}",
            ),
            about=f"{where}: its {name} is {value}, ",
        )
    return index


def components_in(index: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Returns library and class of each component that is there, by name."""
    lists = {name: value for name, value in index.items() if isinstance(value, list)}
    return {
        name: (value[0], value[1])
        for name, value in lists.items()
        if value != ABSENT and not name.startswith("_")
    }


def build_pipeline(config: ModelConfig, make: Callable[[str, Any], object]) -> DiffusionPipeline:
    """Builds a pipeline of what `make` returns for the name and the class of each component."""
    index = read_index(config)
    arguments = {name: value for name, value in index.items() if not name.startswith("_")}
    arguments |= {name: None for name, value in arguments.items() if isinstance(value, list)}
    for name, (library, class_name) in components_in(index).items():
        arguments[name] = make(name, component_class(config, name, library, class_name))
    with blaming(f"model.path={config.path}: {INDEX_FILES['diffusion']}"):
        return getattr(diffusers, str(index["_class_name"]))(**arguments)


def component_class(config: ModelConfig, name: str, library: str, class_name: str) -> Any:
    """Returns the class of a component by model_index.json; ValueError if it cannot be read."""
    cls: Any = getattr(import_module(library), class_name, None)
    is_class = isinstance(cls, type)
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


def model_file(path: str, name: str) -> Path:
    """Finds a file of the model at `model.path`, or on the Hub. ValueError says why it cannot."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder / name
    with asking_hub(path, name, key="model.path"):
        if not isinstance(try_to_load_from_cache(path, name), str):
            with suppress(HfHubHTTPError):  # it answers; the download says what is wrong
                ask_hub(path, name)
        return Path(hf_hub_download(path, name, etag_timeout=ANSWER_S))

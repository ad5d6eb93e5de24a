"""A pipeline without weights, built on the meta device from its configuration files alone.

It has the names and the shapes of all layers and takes no memory.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import ModelMixin, SchedulerMixin
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flowgrpo_rc.models.base import FlowModel, adapter_of
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.index import build_pipeline, component_dtype, components_in, read_index
from flowgrpo_rc.models.quantization import quantize_blocks
from flowgrpo_rc.reading import blaming, load_tokenizer, read_mapping

META = torch.device("meta")
_MOST_LAYERS = 1000  # ten times those of the largest models


def build_architecture(config: ModelConfig) -> FlowModel:
    """Builds the adapter of a checkpoint around models without weights, from its small files alone.

    Tokenizers and other components without weights are None. ValueError if a file cannot be read.
    """
    adapter = adapter_of(config)

    def make(name: str, cls: Any) -> object:
        dtype = component_dtype(config, name, META, stock_in_bf16=adapter.vae_in_bf16)
        with blaming(f"model.path={config.path}: the settings of its {name}"):
            if issubclass(cls, PreTrainedModel):
                settings = cls.config_class.from_pretrained(config.path, subfolder=name)
                _check_layers(f"{name}/config.json", settings.to_dict())
                with META:
                    return cls(settings).to(dtype)
            if issubclass(cls, ModelMixin):
                settings = cls.load_config(config.path, subfolder=name)
                _check_layers(f"{name}/config.json", settings)
                with META:
                    return cls.from_config(settings).to(dtype)
            if issubclass(cls, SchedulerMixin):
                return cls.from_config(cls.load_config(config.path, subfolder=name))
        return None

    pipeline = build_pipeline(config, make)
    if config.quantization is not None:
        for name in adapter.networks:
            quantize_blocks(getattr(pipeline, name), config.quantization, META)
    return adapter(pipeline, META)


def load_tokenizers(config: ModelConfig) -> dict[str, PreTrainedTokenizerBase]:
    """Loads the tokenizers of a pipeline by their names in its index, and nothing else of it."""
    tokenizers = {}
    for name, (_, class_name) in components_in(read_index(config)).items():
        cls = getattr(transformers, class_name, None)
        is_tokenizer = isinstance(cls, type) and issubclass(cls, PreTrainedTokenizerBase)
        if name.startswith("tokenizer") and is_tokenizer:
            where = f"model.path={config.path}: its {name}"
            tokenizers[name] = load_tokenizer(cls, config.location(), where, subfolder=name)
    return tokenizers


def find_architecture(hub_id: str, folder: Path) -> Path | None:
    """Returns the folder of a model of the Hub, unpacked; None if `folder` has no such file."""
    for file in sorted(folder.glob("*.json")):
        if read_mapping(file)["model_index.json"]["_name_or_path"] == hub_id:
            return unpack_architecture(file)
    return None


@cache
def unpack_architecture(file: Path) -> Path:
    """Writes files of a pipeline, name -> content in one JSON file, to a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{file.stem}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in read_mapping(file).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    return folder


def _check_layers(file: str, settings: Mapping[str, object]) -> None:
    """Raises ValueError if a model would have so many layers that their mere names fill memory."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_layers(file, value)
        counts = value if isinstance(value, list | tuple) else [value]
        is_count = "layers" in str(key) or key == "depth"
        if is_count and any(isinstance(n, int) and n > _MOST_LAYERS for n in counts):
            raise ValueError(f"{file} has {key}={value}, and at most {_MOST_LAYERS} are allowed")

"""A pipeline without weights, built on the meta device from its configuration files alone.

It has the names and the shapes of all layers and takes no memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from transformers import PreTrainedModel

from flowgrpo_rc.models.base import DTYPES, FlowModel, adapter_of
from flowgrpo_rc.models.config import ModelConfig

META = torch.device("meta")


def build_architecture(config: ModelConfig) -> FlowModel:
    """Builds the adapter of a checkpoint around models without weights.

    Args:
      config: the model; `path`, `adapter` and `dtype` are used. Of the checkpoint, only
        model_index.json and the configuration of each component are read.

    Returns:
      The adapter. Tokenizers and other components without weights are None.

    Raises:
      ValueError: as `adapter_of`, or the configuration of a component cannot be read.
    """
    adapter = adapter_of(config)
    index = DiffusionPipeline.load_config(config.path)
    components = {
        name: _component(config, name, *value) if isinstance(value, list) else value
        for name, value in index.items()
        if not name.startswith("_")
    }
    return adapter(getattr(diffusers, adapter.pipeline_class)(**components), META)


def _component(config: ModelConfig, name: str, library: str | None, class_name: str | None) -> Any:
    """A scheduler, or a model in the precision that `load_model` gives it; None for all others."""
    if library is None or class_name is None:
        return None
    try:
        cls = getattr(import_module(library), class_name)
    except AttributeError as error:
        raise ValueError(
            f"model.path={config.path}: its {name} is a {class_name}, which this installation's "
            f"{library} does not have"
        ) from error
    dtype = torch.float32 if name == "vae" else DTYPES[config.dtype]
    try:
        if issubclass(cls, PreTrainedModel):
            settings = cls.config_class.from_pretrained(config.path, subfolder=name)
            with META:
                return cls(settings).to(dtype)
        if issubclass(cls, ModelMixin):
            settings = cls.load_config(config.path, subfolder=name)
            with META:
                return cls.from_config(settings).to(dtype)
        if issubclass(cls, SchedulerMixin):
            return cls.from_config(cls.load_config(config.path, subfolder=name))
    except OSError as error:
        raise ValueError(
            f"model.path={config.path}: the settings of its {name} cannot be read: {error}"
        ) from error
    return None

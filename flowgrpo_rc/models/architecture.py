"""A pipeline built from its configuration files on the meta device: shapes and names, and no
memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from transformers import PreTrainedModel

from flowgrpo_rc.models.base import DTYPES, FlowModel, ModelConfig, adapter_of

META = torch.device("meta")


def build_architecture(config: ModelConfig) -> FlowModel:
    """The adapter of the checkpoint at `config.path`, around models without weights; tokenizers are
    left out.

    Reads model_index.json and the configuration of each part, nothing else. Raises ValueError as
    `adapter_of` does, and for a part whose configuration cannot be read.
    """
    adapter = adapter_of(config)
    index = DiffusionPipeline.load_config(config.path)
    parts = {
        name: _part(config, name, *value) if isinstance(value, list) else value
        for name, value in index.items()
        if not name.startswith("_")
    }
    return adapter(getattr(diffusers, adapter.pipeline_class)(**parts), META)


def _part(config: ModelConfig, name: str, library: str | None, class_name: str | None) -> Any:
    """A scheduler, or a model in the precision that `load_model` gives it; None for what has no
    weights to count.
    """
    if library is None or class_name is None:
        return None
    cls = getattr(import_module(library), class_name)
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

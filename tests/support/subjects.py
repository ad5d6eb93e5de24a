"""Checkpoints that the adapters are tested on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import DiffusionPipeline
from support.tiny_models import TINY, VARIANTS, Tiny

from flowgrpo_rc.models.base import FlowModel, ModelConfig, adapter_of, load_model


def with_own_network(model: FlowModel) -> FlowModel:
    """Returns the same model with a copy of its network: much faster than loading it again."""
    pipeline = copy.copy(model.pipeline)
    for name in model.networks:
        setattr(pipeline, name, copy.deepcopy(getattr(pipeline, name)))
    return type(model)(pipeline, model.device)


class Subject(NamedTuple):
    """A checkpoint under test: its folder, how it was made, and the class that must wrap it."""

    folder: Path
    tiny: Tiny
    adapter: type[FlowModel]

    def load(self, dtype: str = "fp32") -> FlowModel:
        return with_own_network(_loaded(self.folder, dtype))

    def config(self, **changes: Any) -> ModelConfig:
        return ModelConfig(path=str(self.folder), **({"lora_rank": 4, "lora_alpha": 8} | changes))

    def stock(self) -> Any:
        pipeline = copy.copy(_stock(self.folder))
        for name in ("vae", "scheduler"):
            setattr(pipeline, name, copy.deepcopy(getattr(pipeline, name)))
        # As `load` has it: products of matrices differ in their last bits by where these lie.
        for name in self.adapter.networks:
            setattr(pipeline, name, copy.deepcopy(getattr(pipeline, name)))
        return pipeline


@cache
def _loaded(folder: Path, dtype: str) -> FlowModel:
    return load_model(ModelConfig(path=str(folder), dtype=dtype), torch.device("cpu"))


@cache
def _stock(folder: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_subject(name: str, saved: Callable[[str], Path]) -> Subject:
    if name not in TINY | VARIANTS:
        pytest.fail(
            f"the adapter for {name} has no random checkpoint: add one to TINY in "
            "tests/support/tiny_models.py"
        )
    folder = saved(name)
    return Subject(folder, (TINY | VARIANTS)[name], adapter_of(ModelConfig(path=str(folder))))

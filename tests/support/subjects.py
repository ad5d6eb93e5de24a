"""Checkpoints that the adapters are tested on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import DiffusionPipeline
from support.tiny_models import TINY, VARIANTS, Tiny

from flowgrpo_rc.models.base import FlowModel, ModelConfig, adapters_by_pipeline, load_model


class Subject(NamedTuple):
    """A checkpoint under test: its folder, how it was made, and the class that must wrap it."""

    folder: Path
    tiny: Tiny
    adapter: type[FlowModel]

    def load(self, **changes: Any) -> FlowModel:
        return load_model(self.config(**changes), torch.device("cpu"))

    def config(self, **changes: Any) -> ModelConfig:
        return ModelConfig(path=str(self.folder), **({"lora_rank": 4, "lora_alpha": 8} | changes))

    def stock(self) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def make_subject(name: str, saved: Callable[[str], Path]) -> Subject:
    if name not in TINY | VARIANTS:
        pytest.fail(
            f"the adapter for {name} has no random checkpoint: add one to TINY in "
            "tests/support/tiny_models.py"
        )
    folder = saved(name)
    pipeline_class = json.loads((folder / "model_index.json").read_text())["_class_name"]
    return Subject(folder, (TINY | VARIANTS)[name], adapters_by_pipeline()[pipeline_class])

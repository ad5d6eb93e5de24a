"""Small rollouts of the random image model: settings, a LoRA that takes part, samples."""

from __future__ import annotations

import numpy as np
import torch
from support.text_rollouts import lora_state, perturb

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, ModelConfig
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest

KINDS = ("sde", "cps", "dance_sde")
WINDOWS = {
    "first": [[0, 1]],
    "late": [[2, 3]],
    "all": [[0, 1, 2, 3]],
    "per_sample": [[0, 1], [2, 3], [1, 2], [2, 3]],
}
WORDS = ("AB7X", "HELP")


def make_spec(kind: str, guidance: float, **changes: object) -> SamplerSpec:
    values = {
        "height": 32,
        "width": 64,
        "num_inference_steps": 5,
        "guidance_scale": guidance,
        "noise_level": 0.7,
        "sde_type": kind,
        "log_prob_convention": "gaussian",
        "max_sequence_length": 16,
        "dtype": "fp32",
    }
    return SamplerSpec(**(values | changes))  # type: ignore[arg-type]


def trained_lora(model: FlowModel) -> torch.nn.Module:
    """Adds a LoRA whose B is not zero, so that it takes part."""
    transformer = add_lora(model, ModelConfig(path="x", lora_rank=4, lora_alpha=8), seed=0)
    perturb(transformer, 0.02)
    return transformer


def sample_images(
    model: FlowModel,
    transformer: torch.nn.Module,
    spec: SamplerSpec,
    window: list[list[int]],
    *,
    chunk: int = 4,
    keep_means: bool = False,
) -> tuple[DiffusionBatch, np.ndarray]:
    engine = DiffusersEngine(model, transformer, dtype=spec.dtype, chunk_size=chunk)
    engine.sync_weights(lora_state(transformer), version=3)
    prompts = [
        Prompt(text=f'"{word}"', index=i, target=word, negative_text="")
        for i, word in enumerate(WORDS)
    ]
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=prompts, slots=[0, 1]),
        samples_per_prompt=2,
        spec=spec,
        window=torch.tensor(window * (4 // len(window)), dtype=torch.int64),
        seeds=[11, 12, 13, 14],
        keep_means=keep_means,
    )
    chunks = list(engine.generate(request))
    return concat([chunk.batch for chunk in chunks]), np.concatenate(
        [chunk.samples for chunk in chunks]
    )

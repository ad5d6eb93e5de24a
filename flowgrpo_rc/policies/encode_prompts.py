"""Text conditioning of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo_rc.batch import Conditioning, Prompt, SamplerSpec
from flowgrpo_rc.models.base import FlowModel


def encode_prompts(
    model: FlowModel, prompts: Sequence[Prompt], spec: SamplerSpec
) -> tuple[Conditioning, Conditioning | None]:
    """Conditioning of the prompts and, under classifier-free guidance, of their negatives."""
    conditioning = encode_unique(
        model, [prompt.text for prompt in prompts], spec.max_sequence_length
    )
    if model.cfg_scale(spec) <= 1:
        return conditioning, None
    return conditioning, encode_unique(
        model, [p.negative_text for p in prompts], spec.max_sequence_length
    )


def encode_unique(model: FlowModel, texts: list[str], max_sequence_length: int) -> Conditioning:
    """Conditioning of every text [len(texts), ...], each distinct one encoded once."""
    unique = list(dict.fromkeys(texts))
    rows = torch.tensor([unique.index(text) for text in texts], device=model.device)
    return model.encode(unique, max_sequence_length=max_sequence_length)[rows]

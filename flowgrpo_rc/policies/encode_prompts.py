"""Text conditioning of prompts.

Legend: N prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo_rc.batch import Conditioning, Prompt, SamplerSpec
from flowgrpo_rc.models.base import FlowModel


def encode_prompts(
    model: FlowModel, prompts: Sequence[Prompt], spec: SamplerSpec
) -> tuple[Conditioning, Conditioning | None]:
    """Encodes prompts and, under classifier-free guidance, their negatives.

    Args:
      model: the model whose text encoders are used.
      prompts: N prompts.
      spec: says whether there is guidance, and the greatest number of text tokens.

    Returns:
      Conditioning of the prompts, N rows, and of their negatives, N rows; None for the latter
      without guidance.
    """
    length = spec.max_sequence_length
    with model.encoders_at_work():
        conditioning = encode_unique(model, [prompt.text for prompt in prompts], length)
        if model.cfg_scale(spec) <= 1:
            return conditioning, None
        negatives = [prompt.negative_text for prompt in prompts]
        return conditioning, encode_unique(model, negatives, length)


def encode_unique(model: FlowModel, texts: list[str], max_sequence_length: int) -> Conditioning:
    """Encodes texts, each distinct one once.

    Args:
      model: the model whose text encoders are used.
      texts: N texts; equal ones are allowed.
      max_sequence_length: greatest number of text tokens.

    Returns:
      Conditioning of every text, N rows in the order of `texts`.
    """
    unique = list(dict.fromkeys(texts))
    rows = torch.tensor([unique.index(text) for text in texts], device=model.device)
    return model.encode(unique, max_sequence_length=max_sequence_length)[rows]

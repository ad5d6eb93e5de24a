"""Conditioning of prompts: their texts, and their images where they bring some.

Legend: N prompts.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from flowgrpo_rc.batch import Conditioning, Prompt, SamplerSpec
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.models.prompt_cache import PromptCache


def encode_prompts(
    model: FlowModel, prompts: Sequence[Prompt], spec: SamplerSpec, cache: PromptCache | None = None
) -> tuple[Conditioning, Conditioning | None]:
    """Encodes prompts and, under classifier-free guidance, their negatives.

    Args:
      model: the model whose text encoders are used.
      prompts: N prompts.
      spec: says whether there is guidance, how many text tokens there are at most, and how images
        are prepared.
      cache: keeps what is encoded; None for that of the model, if it has one.

    Returns:
      Conditioning of the prompts, N rows, and of their negatives, N rows; None for the latter
      without guidance.
    """
    cache = cache or model.prompt_cache
    # What is kept needs no encoders, so the cache has them fetched if it must.
    with model.encoders_at_work() if cache is None else nullcontext():
        conditioning = encode_unique(model, prompts, spec, cache=cache)
        if model.cfg_scale(spec) <= 1:
            return conditioning, None
        return conditioning, encode_unique(model, prompts, spec, negative=True, cache=cache)


def encode_unique(
    model: FlowModel,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    negative: bool = False,
    cache: PromptCache | None = None,
) -> Conditioning:
    """Encodes the texts of prompts with their images, each distinct pair once.

    Args:
      model: the model whose encoders are used.
      prompts: N prompts; equal ones are allowed.
      spec: says how many text tokens there are at most, and how images are prepared.
      negative: encode their negative texts, with the same images.
      cache: keeps what is encoded; None for that of the model, if it has one.

    Returns:
      Conditioning of every text, N rows in the order of `prompts`.
    """
    pairs = [(p.negative_text if negative else p.text, p.images) for p in prompts]
    unique = list(dict.fromkeys(pairs))
    place = {pair: row for row, pair in enumerate(unique)}
    rows = [place[pair] for pair in pairs]
    cache = cache or model.prompt_cache
    encoded = None if cache is None else cache.find(unique, spec, negative)
    if encoded is None:
        if isinstance(model, EditingModel) and spec.condition_images:
            encoded = model.encode_edits(unique, spec)
        else:
            texts = [text for text, _ in unique]
            length = spec.max_sequence_length
            encoded = model.encode(texts, max_sequence_length=length, negative=negative)
        if cache is not None:
            cache.keep(unique, spec, negative, encoded)
    return encoded.to(model.device).take(torch.tensor(rows, device=model.device), rows)

"""Tokens from logits: log-probabilities, sampling, positions.

Legend: B rows, T tokens, L tokens of a whole row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids`: [B, T] fp32 from logits [B, T, V] of any
    precision and ids [B, T].

    Chosen logit minus logsumexp, so that the log-probabilities of the whole vocabulary are never
    held.
    """
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """ids [B] drawn from softmax(logits [B, V] / temperature), row i with the number uniforms[i] in
    [0, 1).

    The first token whose cumulative probability exceeds the number. The sum runs in float64 and may
    still be out of order by a rounding error where a device adds in blocks; tokens of probability 0
    are therefore never candidates.
    """
    probs = _scaled(logits, temperature).softmax(-1).double()
    cumulative = torch.where(probs > 0, probs.cumsum(-1), 0.0)
    total = cumulative.amax(-1)
    # The product may round up to the total itself, which no token exceeds.
    threshold = torch.minimum(
        uniforms.to(total) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return (cumulative > threshold.unsqueeze(-1)).int().argmax(-1)


def positions(mask: Tensor) -> Tensor:
    """[B, L] int64: how many tokens of `mask` [B, L] stand before each one; 0 in the padding on the
    left.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def until_end(ids: Tensor, end_ids: Tensor) -> Tensor:
    """[B, T] bool, True up to and including the first of `end_ids` [E] in each row of `ids` [B,
    T].
    """
    ends = torch.isin(ids, end_ids).long()
    return ends.cumsum(-1) - ends == 0


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32; without a copy where nothing changes."""
    return logits.float() if temperature == 1 else logits.float() / temperature

"""Tokens from logits: log-probabilities, sampling, positions.

Legend: B rows, T tokens, L tokens of a whole row (prompt and response), V tokens of the vocabulary.
"""

import torch
from torch import Tensor

_FIXED_POINT = 2.0**52  # what stands for probability 1; a vocabulary of them fits 64 bits


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Computes the log-probability of given tokens.

        log p(id) = z_id - logsumexp(z),   z = logits / temperature

    This form never holds the log-probabilities of the whole vocabulary.

    Args:
      logits: [B, T, V] (or [B, V]) in any precision.
      ids: int64, [B, T] (or [B]).
      temperature: of the sampling, above 0.

    Returns:
      Log-probabilities in nats, fp32, of the shape of `ids`; differentiable in the logits.
    """
    # Gathered before logsumexp is subtracted: [B, T] numbers in place of [B, T, V].
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Samples one token for each row by inverting the cumulative distribution.

        id = the first token with p_1 + ... + p_id > u,   p = softmax(logits / temperature)

    Args:
      logits: [B, V] in any precision.
      uniforms: the random number u of each row, [B], in [0, 1).
      temperature: of the sampling, above 0.

    Returns:
      Token ids, int64, [B].
    """
    probs = _scaled(logits, temperature).softmax(-1).double()
    # Sums of integers do not depend on their order, so every device finds the same token.
    cumulative = (probs * _FIXED_POINT).long().cumsum(-1)
    total = cumulative[..., -1:]
    # Below the total, so that rounding up never runs past the last token.
    threshold = (uniforms.double().unsqueeze(-1) * total).long().minimum(total - 1)
    return (cumulative > threshold).int().argmax(-1)


def positions(mask: Tensor) -> Tensor:
    """Counts the tokens before each one, as position embeddings need it.

    Args:
      mask: bool, [B, L]; True at tokens, False at padding.

    Returns:
      int64, [B, L]; 0 in the padding on the left.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def until_end(ids: Tensor, end_ids: Tensor) -> Tensor:
    """Returns the mask of each response: True up to and including its first end token.

    Args:
      ids: token ids, int64, [B, T].
      end_ids: the tokens that end a response, int64, [E].

    Returns:
      bool, [B, T]; all True in a row without an end token.
    """
    ends = torch.isin(ids, end_ids).long()
    # The number of end tokens before a place, which is 0 at the first one.
    ends_before = ends.cumsum(-1) - ends
    return ends_before == 0


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in fp32; without a copy if nothing changes."""
    return logits.float() if temperature == 1 else logits.float() / temperature

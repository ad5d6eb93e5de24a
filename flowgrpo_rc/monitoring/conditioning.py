"""Checks whether an engine conditions on the prompts that it was given.

An engine that encodes prompts itself records what it encoded, and the training graph takes it from
there. So a text that was changed on its way (stripped, whitespace collapsed, cut) makes no
mismatch. Here the trainer's own encoders are asked.

Legend: B samples, N distinct prompts, L text tokens, E width of a text embedding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, Prompt
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.encode_prompts import encode_unique

EVERY = 100  # iterations after which prompts are encoded again


def conditioning_error(
    model: FlowModel, batch: DiffusionBatch, prompts: Sequence[Prompt]
) -> Tensor:
    """Returns the `difference` of each distinct prompt, [N], in the order in which they occur.

    `prompts` are those of the B samples.
    """
    # The last sample of a text and its images stands for all of them.
    row_of = {(prompt.text, prompt.images): row for row, prompt in enumerate(prompts)}
    ours = encode_unique(model, [prompts[row] for row in row_of.values()], batch.spec)
    rows = torch.tensor(list(row_of.values()), device=batch.prompt_index.device)
    return difference(batch.conditioning[batch.prompt_index[rows]], ours)


def difference(theirs: Conditioning, ours: Conditioning) -> Tensor:
    """Computes the largest relative difference between the embeddings of a token.

        max_l |theirs_l - ours_l| / max(|ours_l|, median_l |ours_l|)

    The median keeps a token with a small embedding from counting as a large difference. Encoders of
    two precisions differ by some hundredths, other tokens by about 1. Prompts with other numbers of
    tokens differ by 1 at least; a padding of another length is no difference. Returns [N] fp32.
    """
    ours_mask = ours.tokens()
    theirs_mask = theirs.tokens()
    length = min(ours_mask.shape[1], theirs_mask.shape[1])
    a = theirs.embeds[:, :length].float().to(ours.embeds.device)
    b = ours.embeds[:, :length].float()
    size = b.norm(dim=2)
    # CUDA's median is not deterministic where it finds a place, too.
    median = size.sort(1).values[:, (length - 1) // 2, None]
    size = torch.maximum(size, median)
    error = (a - b).norm(dim=2) / size.clamp(min=torch.finfo(size.dtype).tiny)
    error = torch.where(ours_mask[:, :length], error, 0.0).amax(1)
    other_length = ours_mask.sum(1) != theirs_mask.sum(1).to(ours_mask.device)
    return torch.where(other_length, error.clamp(min=1.0), error)

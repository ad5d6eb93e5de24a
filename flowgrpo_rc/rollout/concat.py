"""Joins the batches of one rollout, such as the chunks that an engine yields."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowgrpo_rc.batch import Batch, Conditioning, DiffusionBatch

B = TypeVar("B", bound=Batch)


def concat(batches: Sequence[B]) -> B:
    """Joins batches of one rollout, in order; pads texts and prompts to the longest.

    ValueError if they differ in a field that their samples share.
    """
    batches = _with_one_conditioning(batches)
    first = batches[0]
    for name in first.shared:
        if not all(_same(getattr(first, name), getattr(batch, name)) for batch in batches):
            raise ValueError(
                f"only batches of one rollout can be joined: their {name} is not the same"
            )
    columns = [batch.per_sample() for batch in batches]
    return first.replace(
        **{name: _stack(name, [column[name] for column in columns]) for name in columns[0]}
    )


def _with_one_conditioning(batches: Sequence[B]) -> Sequence[B]:
    """Gives all batches of images one conditioning, with the prompts of all; leaves text alone."""
    images = [batch for batch in batches if isinstance(batch, DiffusionBatch)]
    if all(batch.conditioning is images[0].conditioning for batch in images):
        return batches
    conditioning = Conditioning.join([batch.conditioning for batch in images])
    negatives = [batch.negative for batch in images if batch.negative is not None]
    negative = Conditioning.join(negatives) if negatives else None
    # The prompts of a batch come after those of the batches before it.
    starts = [sum(len(batch.conditioning) for batch in images[:i]) for i in range(len(images))]
    return [
        batch.replace(
            conditioning=conditioning, negative=negative, prompt_index=batch.prompt_index + start
        )
        for batch, start in zip(images, starts, strict=True)
    ]


def _same(left: object, right: object) -> bool:
    """Compares two shared fields; conditionings are the same only if they are one object."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is right or (not isinstance(left, Conditioning) and left == right)


def _stack(name: str, columns: Sequence[Tensor]) -> Tensor:
    """The rows of all parts of one field, padded in the second dimension to the longest."""
    if columns[0].ndim < 2 or len({column.shape[1] for column in columns}) == 1:
        return torch.cat(list(columns))
    rows = [row for column in columns for row in column]
    # A response has to follow its prompt at once.
    side = "left" if name.startswith("prompt_") else "right"
    return pad_sequence(rows, batch_first=True, padding_side=side)

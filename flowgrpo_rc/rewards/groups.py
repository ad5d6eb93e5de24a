"""Whole groups out of the chunks in which samples arrive, for rewards that compare a group.

An engine hands over samples prompt by prompt, in chunks that may end within a group. A process
always has whole groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt


class Groups(NamedTuple):
    """The group of each sample of a chunk, [N], and the size of a whole group.

    The samples of a group stand together.
    """

    of: Sequence[int]
    size: int


class Piece(NamedTuple):
    """The samples of one group in a chunk, and the prompt of each."""

    group: int
    samples: Any
    prompts: Sequence[Prompt]


def pieces_of(samples: Any, prompts: Sequence[Prompt], groups: Groups) -> list[Piece]:
    """Cuts a chunk where one group ends and the next begins."""
    pieces = []
    start = 0
    for group, run in groupby(groups.of):
        stop = start + len(list(run))
        pieces.append(Piece(group=group, samples=samples[start:stop], prompts=prompts[start:stop]))
        start = stop
    return pieces


def whole_groups(pieces: Sequence[Piece], size: int) -> Iterator[Piece]:
    """Joins the pieces of each group, in order.

    Raises:
      ValueError: a group has another number of samples than `size`.
    """
    for group, run in groupby(pieces, lambda piece: piece.group):
        parts = list(run)
        prompts = [prompt for part in parts for prompt in part.prompts]
        if len(prompts) != size:
            raise ValueError(
                f"{len(prompts)} samples of group {group} have arrived, and a reward that compares "
                f"a group needs all {size} (rollout.n) together"
            )
        yield Piece(group=group, samples=_joined([part.samples for part in parts]), prompts=prompts)


def _joined(parts: Sequence[Any]) -> Any:
    match parts[0]:
        case np.ndarray():
            return np.concatenate(parts)
        case Tensor():
            return torch.cat(list(parts))
    return [text for part in parts for text in part]

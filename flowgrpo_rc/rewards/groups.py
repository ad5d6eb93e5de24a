"""Whole groups out of the chunks in which samples arrive, for rewards that compare a group.

An engine hands over samples prompt by prompt, in chunks that may end within a group. A process
always has whole groups.
"""

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


class Member(NamedTuple):
    """A sample of a group."""

    group: int
    sample: Any
    prompt: Prompt


def whole_groups(members: Sequence[Member], size: int) -> Iterator[tuple[Any, list[Prompt]]]:
    """Yields samples and prompts of each group, in order; ValueError for one that is not whole."""
    for group, run in groupby(members, lambda member: member.group):
        group_members = list(run)
        if len(group_members) != size:
            raise ValueError(
                f"{len(group_members)} samples of group {group} have arrived, and a reward that "
                f"compares a group needs all {size} (rollout.n) together"
            )
        yield (
            _joined([member.sample for member in group_members]),
            [member.prompt for member in group_members],
        )


def _joined(samples: list[Any]) -> Any:
    match samples[0]:
        case np.ndarray():
            return np.stack(samples)
        case Tensor():
            return torch.stack(samples)
    return samples

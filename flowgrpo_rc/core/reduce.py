"""Masked reductions, and how a statistic becomes that of all processes.

A statistic of the global batch is built from sums; `AllReduce` adds such sums over the processes
and is the
identity for a single one. Selection is by `torch.where`: a masked-out inf or nan takes no part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def identity(total: Tensor) -> Tensor:
    """The reduction of a single process."""
    return total


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` (bool, same shape) holds, 0 elsewhere."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def select_(values: Tensor, mask: Tensor) -> Tensor:
    """`select` in place, for temporaries: memory that is not in the cache yet costs more than the
    arithmetic.
    """
    return values.masked_fill_(~mask, 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` (bool, same shape) holds."""
    selected = select(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def row_counts(mask: Tensor) -> Tensor:
    """How many elements hold in each row of `mask` (bool [B, T]): [B] float64."""
    return mask.sum(1, dtype=torch.int32).double()  # twice as fast as in int64, the default


def row_max(values: Tensor) -> Tensor:
    """Maximum of each row of `values` [B, T] that are never negative; 0 for rows of no element."""
    return values.amax(1) if values.shape[1] else values.sum(1)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, *, all_reduce: AllReduce = identity
) -> Tensor:
    """Mean of `values` where `mask` holds, 0 where nothing is selected; over all processes for
    dim=None.
    """
    total, count = masked_sum(values, mask, dim), mask.sum() if dim is None else mask.sum(dim)
    if dim is None:
        total, count = all_reduce(torch.stack([total, count.to(total.dtype)]))
    return total / count.clamp(min=1)

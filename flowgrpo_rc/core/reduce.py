"""Masked reductions, and how a statistic becomes one of all processes.

Every statistic of the global batch is built from sums. An `AllReduce` adds such sums over the
processes; for a single process it is `identity`. Masks select by `torch.where` and never multiply,
so an inf or nan that is masked out has no effect.

Legend: B samples, T steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def identity(total: Tensor) -> Tensor:
    """Returns its argument: the reduction of a single process."""
    return total


def select(values: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` where `mask`, bool of their shape, holds and 0 elsewhere.

    No gradient flows where the mask is False.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def select_(values: Tensor, mask: Tensor) -> Tensor:
    """Sets `values` to 0 in place where `mask` does not hold, and returns them.

    It is `select` for temporaries, and faster: new memory that is not in the cache yet costs more
    than the arithmetic.
    """
    return values.masked_fill_(~mask, 0)


def row_counts(mask: Tensor) -> Tensor:
    """Counts the elements of each row of a mask, bool [B, T], that hold: float64 [B]."""
    # An int32 sum is twice as fast as one in int64, the default.
    return mask.sum(1, dtype=torch.int32).double()


def row_max(values: Tensor) -> Tensor:
    """Returns the maximum of each row of values [B, T] that are never negative; 0 if T is 0."""
    return values.amax(1) if values.shape[1] else values.sum(1)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, *, all_reduce: AllReduce = identity
) -> Tensor:
    """Computes the mean of `values` where `mask`, bool of their shape, holds; 0 where it never
    does.

    Args:
      dim: the dimension to average over, on this process alone; None for all dimensions and all
        processes.
      all_reduce: adds a tensor over the processes; without effect unless dim is None.
    """
    selected = select(values, mask)
    if dim is not None:
        return selected.sum(dim) / mask.sum(dim).clamp(min=1)
    total = selected.sum()
    total, count = all_reduce(torch.stack([total, mask.sum().to(total.dtype)]))
    return total / count.clamp(min=1)

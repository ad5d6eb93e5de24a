"""Small histograms of log-ratios and weights, one row a step in histograms.jsonl.

The bins are the same in all steps and runs: ten for each power of ten of the size, on both sides of
zero. So counts add up over processes and steps, whatever the scale of the mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.monitoring.decisions import Decision

SMALLEST = 1e-9  # what is smaller counts as zero
BINS_PER_DECADE = 10
LAST = (
    12 * BINS_PER_DECADE
)  # the outermost bins hold whatever is larger than 1e3, infinite values included

Counts = Mapping[int, int]


def edges(numbers: range) -> list[float]:
    """Of consecutive bins, from the lowest."""
    return [bin_edges(numbers[0])[0], *(bin_edges(number)[1] for number in numbers)]


def bin_edges(number: int) -> tuple[float, float]:
    """Lower and upper edge of a bin: 0 is around zero, 1 the first above it, -1 the first below."""
    if number == 0:
        return -SMALLEST, SMALLEST
    inner, outer = (SMALLEST * 10 ** ((abs(number) - side) / BINS_PER_DECADE) for side in (1, 0))
    return (inner, outer) if number > 0 else (-outer, -inner)


def count(values: Tensor) -> Tensor:
    """How many of `values` [N] are in each bin [2 LAST + 1] float64, from the lowest; nan aside."""
    values = values[~values.isnan()].double()
    place = 1 + torch.floor(BINS_PER_DECADE * torch.log10(values.abs() / SMALLEST))
    index = (values.sign() * place.clamp(0, LAST)).long()
    return torch.bincount(index + LAST, minlength=2 * LAST + 1).double()


def histograms(seen: Sequence[Decision], all_reduce: AllReduce = identity) -> dict[str, Counts]:
    """Of what all processes saw before the first update of a step; empty bins are left out.

    log_ratio: training - rollout of every step that exists; log_weight: the logarithm of what the
    loss multiplies kept steps by, where it does (before batch normalisation in bypass mode). A
    weight of 0 is in the lowest bin.
    """
    fresh = [one for one in seen if not one.updated]
    columns = {"log_ratio": [one.difference[one.valid] for one in fresh]}
    weighted = [
        one.weights[one.valid & one.kept].double().log() for one in fresh if one.weights is not None
    ]
    columns |= {"log_weight": weighted} if weighted else {}
    counted = all_reduce(
        torch.stack([count(torch.cat(values)) for values in columns.values()])
    ).tolist()
    return {
        name: {number - LAST: int(found) for number, found in enumerate(row) if found}
        for name, row in zip(columns, counted, strict=True)
    }

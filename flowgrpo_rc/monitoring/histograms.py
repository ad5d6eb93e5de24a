"""Small histograms of log-ratios and weights, one row a step in histograms.jsonl.

The bins are the same in all steps and runs: ten for each power of ten of the size, on both sides of
zero. Counts therefore add up over processes and steps, whatever the scale of the mismatch.

Shapes: N values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.monitoring.decisions import Decision

SMALLEST = 1e-9  # smaller sizes count as zero
BINS_PER_DECADE = 10
# The number of the outermost bins, which hold all sizes above 1e3, infinite ones included.
LAST = 12 * BINS_PER_DECADE

Counts = Mapping[int, int]


def edges(numbers: range) -> list[float]:
    """Returns the edges of consecutive bins, from the lowest."""
    return [bin_edges(numbers[0])[0], *(bin_edges(number)[1] for number in numbers)]


def bin_edges(number: int) -> tuple[float, float]:
    """Returns the lower and upper edge of a bin.

    Bin 0 is around zero, bin 1 the first above it, bin -1 the first below it.
    """
    if number == 0:
        return -SMALLEST, SMALLEST
    inner = SMALLEST * 10 ** ((abs(number) - 1) / BINS_PER_DECADE)
    outer = SMALLEST * 10 ** (abs(number) / BINS_PER_DECADE)
    return (inner, outer) if number > 0 else (-outer, -inner)


def count(values: Tensor) -> Tensor:
    """Counts how many of the values [N] are in each bin, from the lowest; nan is left out.

    Returns:
      float64, [2 LAST + 1].
    """
    values = values[~values.isnan()].double()
    place = 1 + torch.floor(BINS_PER_DECADE * torch.log10(values.abs() / SMALLEST))
    index = (values.sign() * place.clamp(0, LAST)).long()
    return torch.bincount(index + LAST, minlength=2 * LAST + 1).double()


def histograms(
    decisions: Sequence[Decision], all_reduce: AllReduce = identity
) -> dict[str, Counts]:
    """Counts what all processes saw before the first update of a step; empty bins are left out.

    Args:
      decisions: the decisions of this process in the step.
      all_reduce: sums a tensor over the processes.

    Returns:
      `log_ratio`: training minus rollout log-prob of every step that exists. `log_weight`, if the
      loss has weights: the logarithm of the weights of kept steps, in bypass mode before batch
      normalisation; a weight of 0 is in the lowest bin.
    """
    if not decisions:  # a loss without log-probs, on all processes
        return {}
    fresh = [decision for decision in decisions if not decision.updated]
    columns = {"log_ratio": [decision.difference[decision.step_mask] for decision in fresh]}
    weighted = [
        decision.weights[decision.step_mask & decision.keep_mask].double().log()
        for decision in fresh
        if decision.weights is not None
    ]
    if weighted:
        columns["log_weight"] = weighted
    counted = all_reduce(
        torch.stack([count(torch.cat(values)) for values in columns.values()])
    ).tolist()
    return {
        name: {number - LAST: int(found) for number, found in enumerate(row) if found}
        for name, row in zip(columns, counted, strict=True)
    }

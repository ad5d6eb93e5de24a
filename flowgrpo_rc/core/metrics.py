"""Metrics that stay on the device, know how they reduce, and reach the host in one transfer.

A metric's name has the form "group/name". A last part that starts with `_` marks an intermediate
value, which later metrics are derived from and which no result holds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import AllReduce, identity, select

Columns = TypeVar("Columns", bound=tuple[Tensor, ...])
Derived = Callable[..., float]
_FEW = 4096  # elements; a larger tensor is reduced at once, since keeping it would cost memory


class MetricBag:
    """A collection of metrics over micro-batches, steps and processes.

    A mean is kept as a sum and a count, a maximum as a maximum. So the result is the mean or the
    maximum of the global batch, not a mean of maxima. Sums are float64. Nothing is read back to
    the host before `compute`. Values carry no gradient.

    Elements wait until `compute`, which reduces those of all micro-batches at once: many small
    reductions would cost more time than everything else that is measured. So a tensor must not
    change after it was added.
    """

    def __init__(self) -> None:
        # Name -> tensors of any shape, whose elements are still to be reduced.
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, list[Tensor]] = {}
        self._minima: dict[str, list[Tensor]] = {}
        self._derived: dict[str, tuple[tuple[str, ...], Derived]] = {}
        # Prefix and topic -> what is computed of its columns, and the columns of each block.
        self._rows: dict[tuple[str, str], tuple[Callable[[Any], MetricBag], list[Any]]] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds elements, those where `mask` (bool, of their shape) holds, to a mean.

        A metric without any element is absent from the result.
        """
        values = values.detach()
        if mask is None:
            count = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
            self.ratio(name, values, count)
        else:
            self.ratio(name, select(values, mask), mask)

    def ratio(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds a sum and a count, or what adds up to them, to a mean; absent if the count is 0."""
        self._add(self._sums, name, total)
        self._add(self._counts, name, count)

    def sum(self, name: str, value: Tensor) -> None:
        """Adds all elements of a tensor, of any shape, to a sum."""
        self._add(self._sums, name, value)

    def max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds elements to a maximum; arguments as of `mean`."""
        self._extremum(self._maxima, name, values, mask, -math.inf)

    def min(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds elements to a minimum; arguments as of `mean`."""
        self._extremum(self._minima, name, values, mask, math.inf)

    def derive(self, name: str, needs: Sequence[str], function: Derived) -> None:
        """Defines a metric that follows from others after their reduction.

        A standard deviation, for example, follows from the means of x and of x^2. `function` takes
        the values of `needs`, in order. The metric is absent if one of them is.
        """
        self._derived[name] = (tuple(needs), function)

    def rows(
        self, topic: str, function: Callable[[Columns], "MetricBag"], columns: Columns
    ) -> None:
        """Adds a block of rows, one number of each row in a column, to those of a topic.

        The metrics of a topic are computed once, from the columns of all its blocks, and do not
        depend on where blocks begin. To rename or replace metrics computes them at once.

        Args:
          topic: what the columns are about; every block has the same columns and function.
          function: computes the metrics from the columns of all rows, [B].
          columns: a NamedTuple of the columns of the block, [b].
        """
        self._rows.setdefault(("", topic), (function, []))[1].append(columns)

    def rename(self, names: Mapping[str, str], *, keep: bool) -> None:
        """Gives metrics other names, old -> new; with `keep` they keep the old ones as well."""
        self._compute_rows()
        for store in self._stores():
            for old, new in names.items():
                if old in store:
                    store[new] = copy(store[old]) if keep else store.pop(old)
        if not keep:
            self._derived = {
                name: (tuple(names.get(need, need) for need in needs), function)
                for name, (needs, function) in self._derived.items()
            }

    def pick(self, names: Mapping[str, str]) -> "MetricBag":
        """Returns some of the metrics, without those of rows, under new names: old -> new."""
        metrics = MetricBag()
        for store, picked in zip(self._stores(), metrics._stores(), strict=True):
            picked.update({new: copy(store[old]) for old, new in names.items() if old in store})
        return metrics

    def replace(self, other: "MetricBag", prefix: str = "") -> None:
        """Takes in another bag, as `merge` does, in place of metrics that have the same names."""
        self._compute_rows()
        other._compute_rows()
        taken = {_join(prefix, name) for store in other._stores() for name in store}
        for store in self._stores():
            for name in taken & store.keys():
                del store[name]
        self.merge(other, prefix)

    def merge(self, other: "MetricBag", prefix: str = "") -> None:
        """Takes in another bag, as if its elements had been added here; `prefix/` goes before."""
        # References, not copies: the elements are reduced once, in `compute`.
        for ours, theirs in zip(self._stores()[:-1], other._stores()[:-1], strict=True):
            for name, values in theirs.items():
                ours.setdefault(_join(prefix, name), []).extend(values)
        for name, (needs, function) in other._derived.items():
            self._derived[_join(prefix, name)] = (
                tuple(_join(prefix, need) for need in needs),
                function,
            )
        for (inner, topic), (of_columns, blocks) in other._rows.items():
            key = (f"{prefix}/{inner}".strip("/"), topic)
            self._rows.setdefault(key, (of_columns, []))[1].extend(blocks)

    def compute(
        self,
        all_reduce_sum: AllReduce = identity,
        all_reduce_max: AllReduce = identity,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:
        """Reduces over the processes and brings everything to the host at once.

        Every process must hold the same names.

        Args:
          all_reduce_sum: adds a tensor over the processes.
          all_reduce_max: takes its elementwise maximum over the processes.
          device: where the processes reduce.

        Returns:
          Name -> value, without metrics that have no element and without intermediate ones.
        """
        self._compute_rows()
        summed = sorted(self._sums)
        counted = sorted(self._counts)
        upper = sorted(self._maxima)
        lower = sorted(self._minima)
        sums = [_sum(self._sums[name]) for name in summed]
        sums += [_sum(self._counts[name]) for name in counted]
        # A minimum travels as the maximum of negative values: one reduction serves both.
        maxima = [_all(self._maxima[name]).amax() for name in upper]
        maxima += [-_all(self._minima[name]).amin() for name in lower]
        # One tensor and one transfer for all sums, one for all extrema.
        reduced = []
        if sums:
            reduced.append(all_reduce_sum(torch.stack([value.to(device) for value in sums])))
        if maxima:
            reduced.append(all_reduce_max(torch.stack([value.to(device) for value in maxima])))
        flat = iter(torch.cat(reduced).tolist() if reduced else [])
        total = {name: next(flat) for name in summed}
        count = {name: next(flat) for name in counted}
        highest = {name: next(flat) for name in upper}
        lowest = {name: -next(flat) for name in lower}
        result = {
            name: total[name] / count.get(name, 1.0) for name in total if count.get(name, 1.0) > 0
        }
        # An extremum of nothing stayed infinite, and is no number to report.
        result |= {name: value for name, value in highest.items() if value != -math.inf}
        result |= {name: value for name, value in lowest.items() if value != math.inf}
        # Last, in the order of their definition: one may need another that is derived.
        for name, (needs, function) in self._derived.items():
            if all(need in result for need in needs):
                result[name] = function(*(result[need] for need in needs))
        return {
            name: value
            for name, value in result.items()
            if not name.rsplit("/", 1)[-1].startswith("_")
        }

    def _compute_rows(self) -> None:
        rows = self._rows
        self._rows = {}
        for (prefix, _), (function, blocks) in rows.items():
            columns = type(blocks[0])._make(map(torch.cat, zip(*blocks, strict=True)))
            self.merge(function(columns), prefix)

    def _stores(self) -> tuple[dict[str, Any], ...]:
        return self._sums, self._counts, self._maxima, self._minima, self._derived

    def _add(self, store: dict[str, list[Tensor]], name: str, values: Tensor) -> None:
        values = values.detach()
        # Few elements wait for one reduction of all; many would cost memory until then.
        few = values.numel() <= _FEW
        store.setdefault(name, []).append(values if few else values.double().sum())

    def _extremum(
        self,
        store: dict[str, list[Tensor]],
        name: str,
        values: Tensor,
        mask: Tensor | None,
        empty: float,
    ) -> None:
        values = values.detach().double()
        if mask is not None:
            # A select: what is masked out may be nan.
            values = torch.where(mask, values, empty)
        if values.numel() == 0:  # a reduction of nothing fails
            values = values.new_full((), empty)
        elif values.numel() > _FEW:
            values = values.amax() if empty < 0 else values.amin()
        store.setdefault(name, []).append(values)


def _all(values: Sequence[Tensor]) -> Tensor:
    """Returns the elements of all tensors, float64 [number of elements]."""
    return torch.cat([value.flatten() for value in values]).double()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return _all(values).sum()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def std_from_moments(mean: float, mean_square: float) -> float:
    """Computes the standard deviation of a population from two moments.

        std = sqrt(mean_square - mean^2)

    Args:
      mean: mean of x.
      mean_square: mean of x^2.

    Returns:
      The standard deviation. A difference below 0 is a rounding error and gives 0; an infinite
      mean_square gives inf.
    """
    return math.inf if math.isinf(mean_square) else math.sqrt(max(mean_square - mean * mean, 0.0))


def sample_std_from_moments(mean: float, mean_square: float, count: float) -> float:
    """Computes the standard deviation of a sample from two moments, with n - 1 in its denominator.

        std = sqrt((mean_square - mean^2) n / (n - 1))

    Args:
      mean: mean of x.
      mean_square: mean of x^2.
      count: number of elements, n.

    Returns:
      The standard deviation; 0 for a single element.
    """
    return (
        std_from_moments(mean, mean_square) * math.sqrt(count / (count - 1)) if count > 1 else 0.0
    )

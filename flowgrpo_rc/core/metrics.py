"""MetricBag: metrics as device tensors that know how they reduce, with one host transfer for all of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.core.reduce import AllReduce, identity, masked_sum

Derived = Callable[..., float]


class MetricBag:
    """Collects metrics over micro-batches, steps and processes.

    A mean is kept as a sum and a count, a maximum as a maximum, so that the result is that of the
    global batch and not a mean of maxima. Sums are float64. Nothing is read back before `compute`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}
        self._derived: dict[str, tuple[tuple[str, ...], Derived]] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Mean over the elements where `mask` (bool) holds; absent from the result if there is
        none.
        """
        values = values.detach().double()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        self.ratio(name, masked_sum(values, mask), mask.sum())

    def ratio(self, name: str, total: Tensor, count: Tensor) -> None:
        """A mean from its sum and the number (or weight) of its elements; absent from the result if
        that is 0.
        """
        self._add(self._sums, name, total.detach().double())
        self._add(self._counts, name, count.detach().double())

    def sum(self, name: str, value: Tensor) -> None:
        """Sum over everything that is put under this name."""
        self._add(self._sums, name, value.detach().double().sum())

    def max(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Maximum where `mask` holds; absent from the result if there is nothing."""
        self._extremum(self._maxima, name, values, mask, -math.inf, torch.maximum)

    def min(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Minimum where `mask` holds; absent from the result if there is nothing."""
        self._extremum(self._minima, name, values, mask, math.inf, torch.minimum)

    def derive(self, name: str, needs: Sequence[str], function: Derived) -> None:
        """A metric that follows from other reduced ones, such as a standard deviation from two
        moments.

        `function` gets the values of `needs`, in order; the metric is absent where one of them is.
        Names that start with `_` are intermediate and leave the result after this.
        """
        self._derived[name] = (tuple(needs), function)

    def rename(self, names: Mapping[str, str], *, keep: bool) -> None:
        """Give metrics another name, or with `keep` a second one."""
        for store in self._stores():
            for old, new in names.items():
                if old in store:
                    store[new] = store[old] if keep else store.pop(old)
        if not keep:
            self._derived = {
                name: (tuple(names.get(need, need) for need in needs), function)
                for name, (needs, function) in self._derived.items()
            }

    def pick(self, names: Mapping[str, str]) -> MetricBag:
        """Those of the metrics in `names` that are here, under their new names."""
        bag = MetricBag()
        for store, own in zip(self._stores(), bag._stores(), strict=True):
            own.update({new: store[old] for old, new in names.items() if old in store})
        return bag

    def replace(self, other: MetricBag, prefix: str = "") -> None:
        """As `merge`, but what `other` has takes the place of what is here under the same name."""
        taken = {_join(prefix, name) for store in other._stores() for name in store}
        for store in self._stores():
            for name in taken & store.keys():
                del store[name]
        self.merge(other, prefix)

    def merge(self, other: MetricBag, prefix: str = "") -> None:
        """Take in another bag, as if its elements had been put here."""
        for name, value in other._sums.items():
            self._add(self._sums, _join(prefix, name), value)
        for name, value in other._counts.items():
            self._add(self._counts, _join(prefix, name), value)
        for name, value in other._maxima.items():
            self._fold(self._maxima, _join(prefix, name), value, torch.maximum)
        for name, value in other._minima.items():
            self._fold(self._minima, _join(prefix, name), value, torch.minimum)
        for name, (needs, function) in other._derived.items():
            self._derived[_join(prefix, name)] = (
                tuple(_join(prefix, need) for need in needs),
                function,
            )

    def compute(
        self,
        all_reduce_sum: AllReduce = identity,
        all_reduce_max: AllReduce = identity,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:
        """Reduce over the processes on `device` and bring everything to the host at once.

        Every process must hold the same names. Metrics without any element (empty masks) are left
        out.
        """
        summed, counted = sorted(self._sums), sorted(self._counts)
        upper, lower = sorted(self._maxima), sorted(self._minima)
        sums = [self._sums[name] for name in summed] + [self._counts[name] for name in counted]
        maxima = [self._maxima[name] for name in upper] + [-self._minima[name] for name in lower]
        parts = []
        if sums:
            parts.append(all_reduce_sum(torch.stack([value.to(device) for value in sums])))
        if maxima:
            parts.append(all_reduce_max(torch.stack([value.to(device) for value in maxima])))
        flat = iter(torch.cat(parts).tolist() if parts else [])
        total = {name: next(flat) for name in summed}
        count = {name: next(flat) for name in counted}
        highest = {name: next(flat) for name in upper}
        lowest = {name: -next(flat) for name in lower}
        result = {
            name: total[name] / count.get(name, 1.0) for name in total if count.get(name, 1.0) > 0
        }
        result |= {name: value for name, value in highest.items() if value != -math.inf}
        result |= {name: value for name, value in lowest.items() if value != math.inf}
        for name, (needs, function) in self._derived.items():
            if all(need in result for need in needs):
                result[name] = function(*(result[need] for need in needs))
        return {
            name: value
            for name, value in result.items()
            if not name.rsplit("/", 1)[-1].startswith("_")
        }

    def _stores(self) -> tuple[dict[str, Any], ...]:
        return self._sums, self._counts, self._maxima, self._minima, self._derived

    @staticmethod
    def _fold(
        store: dict[str, Tensor], name: str, value: Tensor, op: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        store[name] = op(store[name], value) if name in store else value

    def _add(self, store: dict[str, Tensor], name: str, value: Tensor) -> None:
        self._fold(store, name, value, torch.add)

    def _extremum(
        self,
        store: dict[str, Tensor],
        name: str,
        values: Tensor,
        mask: Tensor | None,
        empty: float,
        op: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        values = values.detach().double()
        if mask is not None:
            values = torch.where(mask, values, torch.full_like(values, empty))
        values = torch.cat([values.flatten(), values.new_full((1,), empty)])
        self._fold(store, name, values.amax() if empty < 0 else values.amin(), op)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def std_from_moments(mean: float, mean_square: float) -> float:
    """Population standard deviation; a rounding error below zero counts as zero, and inf has an
    infinite one.
    """
    return math.inf if math.isinf(mean_square) else math.sqrt(max(mean_square - mean * mean, 0.0))


def sample_std_from_moments(mean: float, mean_square: float, count: float) -> float:
    """Standard deviation of a sample of `count` elements (n - 1 in the denominator); 0 for a single
    one.
    """
    return (
        std_from_moments(mean, mean_square) * math.sqrt(count / (count - 1)) if count > 1 else 0.0
    )

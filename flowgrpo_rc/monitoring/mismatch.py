"""The noise floor: how far rollout and training graph are apart before an update, and how far the
policy then moves.

Everything comes from forwards that happen anyway. Legend: b rows, t steps that one forward
evaluates, N observations, C cells (`Policy.cells`): the steps of the schedule for images, a single
one for text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.auto_bands import ROBUST
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.metric_names import apply_names
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.expected_mismatch import ExpectedMismatch, by_cell
from flowgrpo_rc.policies.base import Policy

_CLIPPED = {"clip_fraction": "pre_update_clip_fraction"}


class MismatchMonitor:
    """Collects what an iteration sees of the mismatch, training - rollout, and reports it at the
    iteration's end.

    `before` takes forwards from before the first update: decoupled mode gives the recompute of all
    samples, and in bypass mode the first mini-batch serves. Percentiles are those of all processes.

    clip_ratio: half-width of the PPO band of a step's own ratio; None where the loss has no such
    band. expected: what the precisions explain; None where nobody can say.
    """

    def __init__(
        self,
        policy: Policy[Any, Any],
        processes: Processes,
        *,
        bypass: bool,
        clip_ratio: float | None = None,
        expected: ExpectedMismatch | None = None,
        metric_names: str = "verl",
    ) -> None:
        self._policy, self._processes, self._bypass = policy, processes, bypass
        self._clip_ratio, self._expected, self._metric_names = clip_ratio, expected, metric_names
        self._names: Sequence[str] | None = None
        self._start()

    def _start(self) -> None:
        self._differences: list[Tensor] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._clipped = MetricBag()

    def expect(self, batch: Batch, step: int) -> None:
        """Find out what the precisions explain, in the steps where that is due."""
        if self._expected is not None and self._expected.due(step, batch):
            self._expected.measure(batch, len(self._cell_names(batch)))

    def before(self, batch: Batch, log_probs: Tensor) -> None:
        """Log-probs [b, t] of the training graph before any update of this iteration."""
        difference = log_probs.detach().double() - require_rollout_log_probs(batch)
        known = batch.valid & torch.isfinite(difference)
        self._differences.append(torch.where(known, difference, math.nan).flatten())
        self._before.append(self._by_cell(difference, known, batch))

    def during(self, batch: Batch, log_probs: Tensor, metrics: MetricBag, *, updated: bool) -> None:
        """Log-probs [b, t] that a loss with these metrics was computed of; `updated`: after an
        update.
        """
        if not updated:
            self._clipped.merge(metrics.pick(_CLIPPED))
            if self._bypass:
                self.before(batch, log_probs)
            return
        assert batch.old_log_probs is not None
        difference = log_probs.detach().double() - batch.old_log_probs
        self._after.append(
            self._by_cell(difference, batch.valid & torch.isfinite(difference), batch)
        )

    def finish(self) -> MetricBag:
        """The metrics of the iteration, the same on all processes; another one begins."""
        assert self._names is not None
        differences = self._processes.gather_ragged(torch.cat(self._differences))
        before = torch.stack(self._before).sum(0)
        after = torch.stack(self._after).sum(0) if self._after else torch.zeros_like(before)
        before, after = self._processes.sum(torch.stack([before, after]))
        bag = spread(differences, self._clip_ratio)
        _ratio(bag, "logprob_abs_diff_mean", *before.sum(1))
        for name, total, count in zip(self._names, *before, strict=True):
            if name:
                _ratio(bag, f"logprob_abs_diff/{name}", total, count)
        contained = before if self._bypass else torch.stack([torch.zeros_like(after[0]), after[1]])
        _ratio(bag, "policy_drift_abs_mean", *drift(after, contained))
        if self._expected is not None:
            _ratio(bag, "mismatch_over_expected", *over(before, self._expected.values(before)))
        apply_names(bag, self._metric_names, "truncate")
        bag.merge(self._clipped)
        self._start()
        return bag

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        return {} if self._expected is None else self._expected.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `tensors` recorded."""
        if self._expected is not None:
            self._expected.load(tensors)

    def _by_cell(self, difference: Tensor, known: Tensor, batch: Batch) -> Tensor:
        return by_cell(difference, known, self._policy.cells(batch), len(self._cell_names(batch)))

    def _cell_names(self, batch: Batch) -> Sequence[str]:
        """Read from the device once: the schedule is the same in all iterations."""
        if self._names is None:
            self._names = self._policy.cell_names(batch)
        return self._names


def spread(differences: Tensor, clip_ratio: float | None) -> MetricBag:
    """Percentiles, maximum and robust standard deviation of `differences` [N] float64, nan aside:
    1.4826 times the median absolute deviation; and the median size over `clip_ratio`."""
    bag, known = MetricBag(), torch.isfinite(differences).any()
    sizes = differences.abs()
    found = {"p50": quantile(sizes, 0.5), "p99": quantile(sizes, 0.99), "max": quantile(sizes, 1.0)}
    found["std_robust"] = ROBUST * quantile((differences - quantile(differences, 0.5)).abs(), 0.5)
    for name, value in found.items():
        bag.max(f"logprob_abs_diff_{name}", value, known)
    if clip_ratio is not None:
        bag.max("mismatch_over_clip", found["p50"] / clip_ratio, known)
    return bag


def quantile(values: Tensor, fraction: float) -> Tensor:
    """Of `values` [N], nan aside, with linear interpolation; nan for none. `torch.nanquantile`
    stops at 16 million.
    """
    ordered = values.sort().values
    at = fraction * (torch.isfinite(values).sum() - 1).clamp(min=0).double()
    lower, upper = ordered.index_select(0, torch.stack([at.floor(), at.ceil()]).long())
    return torch.lerp(lower, upper, at - at.floor())


def drift(after: Tensor, mismatch: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of |current - old| without the mismatch that it contains, from sums by cell
    [2, C].

    Movement and mismatch are taken as independent and of one shape: the squares of their mean sizes
    add up.
    """
    both = (after[1] > 0) & (mismatch[1] > 0)
    total, noise = (sums[0] / sums[1].clamp(min=1) for sums in (after, mismatch))
    moved = torch.sqrt((total**2 - noise**2).clamp(min=0))
    return select(moved * after[1], both).sum(), select(after[1], both).sum()


def over(sums: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of |difference| / expected, from sums by cell [2, C]; cells of unknown
    expectation, nan, aside.
    """
    known = torch.isfinite(expected)
    return select(sums[0] / expected, known).sum(), select(sums[1], known).sum()


def advised_clip_ratio(p99: float) -> float:
    """The least band of one significant digit that 99% of the pre-update differences stay
    within.
    """
    power = 10.0 ** math.floor(math.log10(p99))
    return float(f"{math.ceil(p99 / power * (1 - 1e-9)) * power:.0e}")


def _ratio(bag: MetricBag, name: str, total: Tensor, count: Tensor) -> None:
    """A mean of all processes, which each of them knows."""
    bag.max(name, total / count, count > 0)

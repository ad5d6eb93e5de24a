"""How far rollout and training graph are apart before an update, and how far the policy then moves.

Everything comes from forwards that happen anyway.

Legend: b rows, t steps that one forward evaluates, N observations, C cells (`Policy.cells`): the
steps of the schedule for images, a single one for text.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.correction.metric_names import apply_names
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.expected_mismatch import ExpectedMismatch, by_cell
from flowgrpo_rc.policies.base import Policy

_CLIPPED = {"clip_fraction": "pre_update_clip_fraction"}


class MismatchMonitor:
    """Collects the mismatch, training - rollout, over an iteration and reports it at the end.

    `before_update` takes forwards from before the first update of an iteration, `after_update`
    later ones. Percentiles are over the samples of all processes.
    """

    def __init__(
        self,
        policy: Policy[Any],
        processes: Processes,
        *,
        clip_ratio: float | None = None,
        expected: ExpectedMismatch | None = None,
        metric_names: str = "verl",
    ) -> None:
        """Takes what the mismatch is compared with.

        `clip_ratio` is the half-width of the PPO band of a step's own ratio, `expected` what the
        precisions explain; None if the loss has no such band, or if nobody can say.
        """
        self._policy = policy
        self._processes = processes
        self._clip_ratio = clip_ratio
        self._expected = expected
        self._metric_names = metric_names
        self._names: Sequence[str] | None = None
        self._unreported: Tensor | None = None  # sums of iterations that were too small
        self._start()

    def _start(self) -> None:
        self._differences: list[Tensor] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._clipped = MetricBag()

    def expect(self, batch: Batch, step: int) -> None:
        """Measures what the precisions explain, in the steps where that is due."""
        num_cells = len(self._cell_names(batch))
        if self._expected is not None and self._expected.due(step, batch):
            self._expected.measure(batch, num_cells)

    def before_update(self, batch: Batch, log_probs: Tensor) -> None:
        """Takes log-probs [b, t] of the training graph before any update of this iteration."""
        difference = log_probs.detach().double() - require_rollout_log_probs(batch)
        known = batch.step_mask & torch.isfinite(difference)
        self._differences.append(torch.where(known, difference, math.nan).flatten())
        self._before.append(self._by_cell(difference, known, batch))

    def clipped(self, metrics: MetricBag) -> None:
        """Takes the metrics of a loss before any update: what it clips there is noise."""
        self._clipped.merge(metrics.pick(_CLIPPED))

    def after_update(self, batch: Batch, log_probs: Tensor) -> None:
        """Takes log-probs [b, t] of the current policy after an update of this iteration."""
        assert batch.old_log_probs is not None
        difference = log_probs.detach().double() - batch.old_log_probs
        known = batch.step_mask & torch.isfinite(difference)
        self._after.append(self._by_cell(difference, known, batch))

    def finish(self, *, recomputes: bool) -> MetricBag:
        """Ends the iteration and returns its metrics, the same on all processes.

        Unless the algorithm `recomputes` the old policy, current - old contains the mismatch.
        """
        assert self._names is not None
        differences = self._processes.gather_ragged(torch.cat(self._differences))
        before = torch.stack(self._before).sum(0)
        after = torch.stack(self._after).sum(0) if self._after else torch.zeros_like(before)
        before, after = self._processes.sum(torch.stack([before, after]))
        metrics = spread(differences, self._clip_ratio)
        _ratio(metrics, "logprob_abs_diff_mean", *before.sum(1))
        for name, total, count in zip(self._names, *before, strict=True):
            if name:
                _ratio(metrics, f"logprob_abs_diff/{name}", total, count)
        no_mismatch = torch.stack([torch.zeros_like(after[0]), after[1]])
        contained = no_mismatch if recomputes else before
        _ratio(metrics, "policy_drift_abs_mean", *drift(after, contained))
        if self._expected is not None:
            self._compare(metrics, before, self._expected)
        apply_names(metrics, self._metric_names, "truncate")
        metrics.merge(self._clipped)
        self._start()
        return metrics

    def tensors(self) -> dict[str, Tensor]:
        """Returns what a checkpoint holds of it."""
        if self._expected is None:
            return {}
        tensors = self._expected.tensors()
        if self._unreported is not None:
            tensors["unreported"] = self._unreported
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes back to what `tensors` recorded."""
        if self._expected is not None:
            self._expected.load(tensors)
        if "unreported" in tensors:
            self._unreported = tensors["unreported"].to(self._processes.device)

    def _compare(self, metrics: MetricBag, sums: Tensor, expected: ExpectedMismatch) -> None:
        """Reports the size over the expectation; small iterations are reported together."""
        if self._unreported is not None:
            sums = sums + self._unreported
        total, count = over(sums, expected.values(sums))
        enough = count >= expected.enough
        metrics.max("mismatch_over_expected", total / count, enough)
        if expected.enough > 1:
            self._unreported = torch.where(enough, torch.zeros_like(sums), sums)

    def _by_cell(self, difference: Tensor, known: Tensor, batch: Batch) -> Tensor:
        num_cells = len(self._cell_names(batch))
        return by_cell(difference, known, self._policy.cells(batch), num_cells)

    def _cell_names(self, batch: Batch) -> Sequence[str]:
        # Reading the names waits for the device. The schedule is the same in all iterations.
        if self._names is None:
            self._names = self._policy.cell_names(batch)
        return self._names


def spread(differences: Tensor, clip_ratio: float | None) -> MetricBag:
    """Measures the size of differences [N] float64, nan left out: percentiles, maximum, deviation.

    The robust standard deviation is 1.4826 times the median absolute deviation. The median size
    over the half-width of the PPO band is `mismatch_over_clip`.
    """
    metrics = MetricBag()
    known = torch.isfinite(differences).any()
    sizes = differences.abs()
    deviations = (differences - quantile(differences, 0.5)).abs()
    median = quantile(sizes, 0.5)
    statistics = {
        "p50": median,
        "p99": quantile(sizes, 0.99),
        "max": quantile(sizes, 1.0),
        "std_robust": ROBUST * quantile(deviations, 0.5),
    }
    for name, value in statistics.items():
        metrics.max(f"logprob_abs_diff_{name}", value, known)
    if clip_ratio is not None:
        metrics.max("mismatch_over_clip", median / clip_ratio, known)
    return metrics


def quantile(values: Tensor, fraction: float) -> Tensor:
    """Returns a quantile of `values` [N] with linear interpolation, leaving out nan; nan for none.

    `torch.nanquantile` stops at 16 million elements.
    """
    ordered = values.sort().values  # nan comes last
    at = fraction * (torch.isfinite(values).sum() - 1).clamp(min=0).double()
    lower, upper = ordered.index_select(0, torch.stack([at.floor(), at.ceil()]).long())
    return torch.lerp(lower, upper, at - at.floor())


def drift(after: Tensor, mismatch: Tensor) -> tuple[Tensor, Tensor]:
    """Computes how far the policy moved: |current - old| without the mismatch that it contains.

    Movement and mismatch are taken as independent and of one shape, so the squares of their mean
    sizes add up. Both are sums of sizes and numbers of steps by cell, [2, C]; returned are sum and
    number over the cells that both know.
    """
    both = (after[1] > 0) & (mismatch[1] > 0)
    total, noise = (sums[0] / sums[1].clamp(min=1) for sums in (after, mismatch))
    moved = torch.sqrt((total**2 - noise**2).clamp(min=0))
    return select(moved * after[1], both).sum(), select(after[1], both).sum()


def over(sums: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Computes sum and number of |difference| / expected from `by_cell` [2, C]; leaves out nan."""
    known = torch.isfinite(expected)
    return select(sums[0] / expected, known).sum(), select(sums[1], known).sum()


def round_up(value: float, digits: int) -> float:
    """Rounds a number up to so many significant digits; 0 stays."""
    if value == 0:
        return value
    places = digits - 1 - math.floor(math.log10(value))
    # A rounding error above a digit is not the next one.
    return math.ceil(value * 10.0**places * (1 - 1e-9)) / 10.0**places


def _ratio(metrics: MetricBag, name: str, total: Tensor, count: Tensor) -> None:
    # All processes know the same sums, so their maximum is the mean.
    metrics.max(name, total / count, count > 0)

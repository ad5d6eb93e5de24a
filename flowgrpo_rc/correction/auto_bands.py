"""`auto:k`: bands that follow the scale of the mismatch, k robust standard deviations about its
running median.

A band judges differences between rollout and training graph before the first update of an
iteration, never the policy's
own movement. Legend: b rows, T steps of the SDE window, S steps of the schedule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.core.row_metrics import RowMetrics
from flowgrpo_rc.correction.log_ratios import LogRatios, compute_log_ratios
from flowgrpo_rc.correction.rejection import judge, statistic
from flowgrpo_rc.correction.thresholds import Band

WARM_UP = (
    64  # observations of a step before its band rejects: the deviation is then known to about 15%
)
MEMORY = (8, 4096)  # the newest iterations that a band follows: so many, and so many observations
FLOOR = 1e-6  # the least standard deviation; fp32 sums in another order differ by 1e-8
ROBUST = (
    1.4826  # the standard deviation of a normal distribution over its median absolute deviation
)

Gather = Callable[[Tensor], Tensor]


class Scale(NamedTuple):
    """Of each step of the schedule [S] float64: median and robust standard deviation; inf until it
    is warm.
    """

    centre: Tensor
    spread: Tensor


class Iteration(NamedTuple):
    """The observations [N] of one iteration and the steps [N] int64 that they are of; nan where
    there was none.
    """

    steps: Tensor
    values: Tensor


class AutoBands:
    """The running statistics of each `auto` criterion.

    k1 and its deviation are those of the log-ratio, on both sides of the median: 1.4826 times the
    median absolute deviation. k2, k3 and step_kl, which are squares, are judged from above by their
    roots, sqrt(2 x), which are again of the order of the log-ratio; since roots are skewed, their
    deviation is that of the upper half, 1.4826 times the distance of the upper quartile from the
    median. A sequence belongs to the first step of its window.

    What is rejected stays in the statistics, so that a band follows a mismatch that really grew.
    """

    def __init__(self, bands: Sequence[Band], num_steps: int, device: torch.device) -> None:
        self._bands, self._num_steps, self._device = bands, num_steps, device
        self._seen: dict[str, list[Iteration]] = {band.name: [] for band in bands}
        self._past: dict[str, deque[Iteration]] = {band.name: deque() for band in bands}
        self._scales = {band.name: self._scale(band) for band in bands}

    def scale(self, name: str) -> Scale:
        """What the criterion `name` goes by now."""
        return self._scales[name]

    def judge(
        self,
        batch: DiffusionBatch,
        training: Tensor,
        step_kl: Tensor | None,
        *,
        remember: bool = True,
    ) -> tuple[DiffusionBatch, MetricBag]:
        """The batch with a `rejection_mask` of the steps that all bands keep, by log-probs [b, T]
        of the training graph before its first update. It follows from earlier iterations, so that
        it does not matter what comes together.

        What they find is remembered for the iterations after `finish`, unless `remember` is false.
        The metrics of a criterion are in robust standard deviations from its median, and 0 until it
        is warm.
        """
        assert batch.rollout_log_probs is not None
        ratios = compute_log_ratios(training, batch.rollout_log_probs, batch.valid, step_kl)
        kept, metrics = ratios.finite_mask, MetricBag()
        for band in self._bands:
            value, scale = observed(ratios, band), self._scales[band.name]
            units, index = ratios.unit_mask(value), batch.step_indices[:, : value.shape[1]]
            if remember:
                seen = torch.where(units, value, torch.nan)
                self._seen[band.name].append(Iteration(index.flatten(), seen.flatten()))
            centre, spread = scale.centre[index], scale.spread[index]
            found = RowMetrics()
            kept = kept & judge(found, ratios, band, select((value - centre) / spread, units))
            metrics.merge(found.bag())
            warm, name = spread < torch.inf, f"rollout_rs_{band.name}"
            metrics.mean(f"{name}_auto_spread", spread, units & warm)
            metrics.mean(f"{name}_auto_warm_fraction", warm.double(), units)
        return batch.replace(rejection_mask=kept), metrics

    def finish(self, gather: Gather) -> None:
        """The end of an iteration: take in what all processes have seen. `gather` joins their
        rows.
        """
        for band in self._bands:
            seen, past = self._seen[band.name], self._past[band.name]
            past.append(
                Iteration(*(gather(torch.cat(column)) for column in zip(*seen, strict=True)))
            )
            held = sum(len(iteration.values) for iteration in past)
            while len(past) > MEMORY[0] and held - len(past[0].values) >= MEMORY[1]:
                held -= len(past.popleft().values)
            self._seen[band.name] = []
            self._scales[band.name] = self._scale(band)

    def tensors(self) -> dict[str, Tensor]:
        """The observations that the bands follow, for a checkpoint."""
        none = torch.zeros(0, dtype=torch.float64, device=self._device)
        found = {}
        for name, past in self._past.items():
            found[f"{name}.sizes"] = torch.tensor(
                [len(iteration.values) for iteration in past], dtype=torch.int64
            )
            found[f"{name}.steps"] = torch.cat([*(one.steps for one in past), none.long()])
            found[f"{name}.values"] = torch.cat([*(one.values for one in past), none])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `tensors` recorded."""
        for band in self._bands:
            sizes = tensors[f"{band.name}.sizes"].tolist()
            columns = (
                tensors[f"{band.name}.{part}"].to(self._device).split(sizes)
                for part in ("steps", "values")
            )
            self._past[band.name] = deque(Iteration(*pair) for pair in zip(*columns, strict=True))
            self._scales[band.name] = self._scale(band)

    def _scale(self, band: Band) -> Scale:
        past = self._past[band.name]
        rows = []
        for step in range(self._num_steps):
            here = [torch.where(one.steps == step, one.values, torch.nan) for one in past]
            rows.append(
                robust(
                    torch.cat([*here, torch.full((1,), torch.nan, device=self._device).double()]),
                    band,
                )
            )
        return Scale(*(torch.stack(column) for column in zip(*rows, strict=True)))


def observed(ratios: LogRatios, band: Band) -> Tensor:
    """A criterion's statistic on the scale of log-ratios: k1 itself, the roots of what is a
    square.
    """
    value = statistic(ratios, band)
    return value if band.estimator == "k1" else torch.sqrt(2 * value)


def robust(values: Tensor, band: Band) -> Scale:
    """Median and robust standard deviation of `values` [N], nan aside; (0, inf) for fewer than
    `WARM_UP`.
    """
    median, upper = torch.nanquantile(
        values, torch.tensor([0.5, 0.75], dtype=torch.float64, device=values.device)
    )
    deviation = (
        torch.nanquantile((values - median).abs(), 0.5)
        if band.estimator == "k1"
        else upper - median
    )
    warm = torch.isfinite(values).sum() >= WARM_UP
    return Scale(
        torch.where(warm, median, 0.0),
        torch.where(warm, (ROBUST * deviation).clamp(min=FLOOR), math.inf),
    )

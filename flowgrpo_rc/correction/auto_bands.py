"""`auto:k`: bands that follow the mismatch, k robust standard deviations about its running median.

A band judges the difference between rollout and training graph by forwards that the update takes
anyway. Those of later mini-batches come after updates, which move the policy, too. So samples are
compared with samples that came as late in an iteration: a band is wide enough for what the updates
usually move, and finds a step that is farther off.

Legend: b rows, T steps of the SDE window, S steps of the schedule, N observations, U stages of an
iteration.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import select
from flowgrpo_rc.correction.history import ROBUST, WARM_UP, Gather, History
from flowgrpo_rc.correction.log_ratios import LogRatios, compute_log_ratios
from flowgrpo_rc.correction.reasons import Reason
from flowgrpo_rc.correction.rejection import inside, statistic
from flowgrpo_rc.correction.thresholds import Band

# The least standard deviation. fp32 sums in another order differ by 1e-8.
LEAST_SPREAD = 1e-6


class Scale(NamedTuple):
    """Says where a band lies and how wide it is, at each step of the schedule; float64, [U * S]."""

    centre: Tensor  # median of the observations; 0 until the step is warm
    spread: Tensor  # their robust standard deviation; inf until the step is warm


class _Judged(NamedTuple):
    """Samples that a band has judged: their seeds, [b], statistics and the scale at each."""

    band: Band
    seed: Tensor
    value: Tensor
    scale: Scale


class AutoBands:
    """Follows the mismatch with the band of each `auto` criterion.

    k1 is the log-ratio with its sign, so its band has two sides. The spread is 1.4826 times the
    median absolute deviation.

    k2, k3 and step_kl are squares, and their bands have an upper side only. They are observed as
    their roots, sqrt(2 x), which have the size of the log-ratio. Roots are skewed, so the spread is
    that of the upper half: 1.4826 times the upper quartile less the median.

    A statistic of a sequence belongs to the first step of its window. What is rejected stays in the
    statistics, so that a band follows a mismatch that really grew.

    Each stage of an iteration has bands of its own: before the first update; after 1 update; after
    2 or 3; after 4 to 7; and so on.
    """

    def __init__(
        self,
        bands: Sequence[Band],
        num_steps: int,
        device: torch.device,
        *,
        num_mini_batches: int = 1,
    ) -> None:
        """Starts with no observation, kept on a device, so that nothing is rejected.

        The bounds of the `auto` criteria, `bands`, are in units of the spread. The schedule has
        `num_steps`, S; each of the `num_mini_batches` of an iteration ends with an update.
        """
        self._bands = bands
        self._num_steps = num_steps
        self._num_cells = num_steps * (1 + stage_of(num_mini_batches - 1))
        self._histories = {band.name: History(device) for band in bands}
        self._scales = {band.name: self._scale(band) for band in bands}
        self._judged: list[_Judged] = []  # in this iteration
        self._finished = False

    def scale(self, name: str) -> Scale:
        """Returns the scale that the criterion `name` is judged by in this iteration."""
        return self._scales[name]

    def judge(
        self,
        batch: DiffusionBatch,
        training: Tensor,
        step_kl: Tensor | None,
        *,
        updates: int = 0,
        remember: bool = True,
    ) -> tuple[DiffusionBatch, MetricBag]:
        """Decides which steps all bands keep.

        The bands come from earlier iterations only. So the decision on a sample does not depend on
        which samples are judged together with it.

        Args:
          batch: samples with rollout log-probs, [b, T].
          training: log-probs of the training graph, [b, T].
          step_kl: exact KL of the steps, [b, T]; None unless a criterion needs it.
          updates: how many updates of the iteration came before.
          remember: add the observations to those that the next iterations are judged by.

        Returns:
          The batch with the decision as its `rejection_mask`, and metrics. Those of a criterion are
          in units of its spread from its centre, and 0 until its step is warm.
        """
        assert batch.rollout_log_probs is not None
        # Reasons are asked for after `finish`, so what was judged stays until the next iteration.
        if self._finished:
            self._judged = []
            self._finished = False
        metrics = MetricBag()
        ratios = compute_log_ratios(training, batch.rollout_log_probs, batch.step_mask, step_kl)
        keep_mask = ratios.finite_mask
        for band in self._bands:
            value = observed(ratios, band)
            units = ratios.unit_mask(value)
            # A sequence has one value, [b, 1], which belongs to the first step of its window.
            steps = batch.step_indices[:, : value.shape[1]]
            cells = steps + stage_of(updates) * self._num_steps
            scale = self._scales[band.name]
            centre = scale.centre[cells]
            spread = scale.spread[cells]
            # nan for no observation, so that all processes gather equal shapes.
            if remember:
                self._histories[band.name].add(cells, torch.where(units, value, torch.nan))
                self._judged.append(_Judged(band, batch.seed, value, Scale(centre, spread)))

            standardised = select((value - centre) / spread, units)
            keep_mask = keep_mask & inside(metrics, ratios, band, standardised)
            warm = spread < torch.inf
            name = f"rollout_rs_{band.name}"
            metrics.mean(f"{name}_auto_spread", spread, units & warm)
            metrics.mean(f"{name}_auto_warm_fraction", warm.double(), units)
        return batch.replace(rejection_mask=keep_mask), metrics

    def reasons(self, seed: int) -> list[Reason]:
        """Returns which bands rejected a sample of this iteration, or of the one just finished.

        Each such band has the value that lies farthest outside, and the bounds that it had there.
        """
        worst: dict[str, tuple[float, Reason]] = {}
        for band, seeds, value, scale in self._judged:
            for row in (seeds == seed).nonzero()[:, 0].tolist():
                deviations = (value[row] - scale.centre[row]) / scale.spread[row]
                beyond = torch.maximum(deviations - band.upper, band.lower - deviations)
                place = int(beyond.nan_to_num(nan=-math.inf).argmax())
                size = float(beyond[place])
                if size > 0 and size > worst.get(band.name, (0.0,))[0]:
                    centre = float(scale.centre[row, place])
                    spread = float(scale.spread[row, place])
                    reason = _reason(band, float(value[row, place]), centre, spread)
                    worst[band.name] = (size, reason)
        return [reason for _, reason in worst.values()]

    def finish(self, gather: Gather) -> None:
        """Ends an iteration: the bands take in what all processes have seen, by `gather`."""
        for band in self._bands:
            self._histories[band.name].finish(gather)
            self._scales[band.name] = self._scale(band)
        self._finished = True

    def tensors(self) -> dict[str, Tensor]:
        """Returns the observations that the bands follow, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, history in self._histories.items():
            tensors |= history.tensors(name)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes back to the observations that `tensors` recorded."""
        for band in self._bands:
            self._histories[band.name].load(tensors, band.name)
            self._scales[band.name] = self._scale(band)

    def _scale(self, band: Band) -> Scale:
        """Computes the scale of a criterion in each cell from the iterations it follows."""
        history = self._histories[band.name]
        scales = [robust(history.of_step(cell), band) for cell in range(self._num_cells)]
        centre = torch.stack([scale.centre for scale in scales])
        spread = torch.stack([scale.spread for scale in scales])
        return Scale(centre, spread)


def stage_of(updates: int) -> int:
    """Returns the stage of an iteration after some of its updates: 0, 1, 2 to 3, 4 to 7, ..."""
    return updates.bit_length()


def observed(ratios: LogRatios, band: Band) -> Tensor:
    """Computes the statistic of a criterion with the size of a log-ratio, [b, T] or [b, 1].

    It is k1 as it is, or sqrt(2 x) of a statistic x that is a square.
    """
    value = statistic(ratios, band)
    return value if band.estimator == "k1" else torch.sqrt(2 * value)


def _reason(band: Band, value: float, centre: float, spread: float) -> Reason:
    """Returns a statistic and its bounds as users know them: k1 as the ratio, squares as such."""
    lower = centre + spread * band.lower
    upper = centre + spread * band.upper
    if band.estimator == "k1":
        return Reason(band.name, math.exp(-value), math.exp(-upper), math.exp(-lower))
    return Reason(band.name, value**2 / 2, None, upper**2 / 2)


def robust(values: Tensor, band: Band) -> Scale:
    """Computes the median and the robust standard deviation of observations.

    Args:
      values: the observations, float64, [N]; nan is left out.
      band: the criterion. `AutoBands` says which deviation it has.

    Returns:
      Two scalars; (0, inf) for fewer than `WARM_UP` observations.
    """
    median = torch.nanquantile(values, 0.5)
    if band.estimator == "k1":
        deviation = torch.nanquantile((values - median).abs(), 0.5)
    else:
        deviation = torch.nanquantile(values, 0.75) - median
    # A tensor, not a bool: the host would wait for the device at every step.
    warm = torch.isfinite(values).sum() >= WARM_UP
    centre = torch.where(warm, median, 0.0)
    spread = torch.where(warm, (ROBUST * deviation).clamp(min=LEAST_SPREAD), math.inf)
    return Scale(centre, spread)

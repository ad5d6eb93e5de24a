"""`clip_ratio: auto:k`: a bound of the loss that follows the mismatch before an update.

A bound below the mismatch pulls the policy towards the rollout's: it holds back the steps whose
noise leads away from the rollout and lets those pass that lead back to it. A bound of k robust
standard deviations lets nearly all noise pass, and still holds back what moves further.

Legend: b rows, t steps that one forward evaluates, S steps of the schedule.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.correction.history import ROBUST, WARM_UP, Gather, History
from flowgrpo_rc.correction.thresholds import parse_deviations
from flowgrpo_rc.losses.base import DIFFUSION_KEY, DiffusionLoss, steps_of

_NAME = "bound"


def parse_auto(key: str, value: object) -> float | None:
    """Parses the k of "auto:k", the value of an option `key`; None if it is a number.

    ValueError if it is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None
    deviations = parse_deviations(value)
    if deviations is None:
        raise ValueError(
            f"{DIFFUSION_KEY}.{key}={value!r}: give a number, or auto:k with the robust standard "
            'deviations k of the mismatch, such as "auto:4"'
        )
    return deviations


def bounded_option(loss: DiffusionLoss, convention: str) -> str | None:
    """Returns the option that "auto:k" can follow: the loss says what it bounds by it."""
    # Any numbers do: only the name of the option is read.
    one = torch.ones(1, 1, dtype=torch.float64)
    steps = GaussianSteps(one, -one, one if loss.needs_means else None)
    bound = loss.bound(0 * one, steps, convention=convention)
    return None if bound is None else bound.option


class AutoClip:
    """Follows what a loss bounds, before any update, at each step of the schedule.

    With the values v of the newest iterations at a step of the schedule:

        a ratio  bound = k 1.4826 median(|exp(v) - 1|)
        a KL     bound = k^2 median(v)

    The deviation is about 0 and not about the median, since a ratio is clipped about 1. A KL grows
    with the square of a movement, so its root is what k counts. A bound is never below that of
    the published recipe, and inf, so that nothing is held back, until its step has `WARM_UP`
    observations.
    """

    def __init__(
        self,
        loss: DiffusionLoss,
        deviations: float,
        *,
        centered: bool,
        num_steps: int,
        device: torch.device,
    ) -> None:
        """Starts without observations.

        `deviations` is k. The schedule has `num_steps`, S.
        """
        self._loss = loss
        self._centered = centered
        self._deviations = deviations
        self._least = 0.0  # bound of the recipe, which only the loss knows
        self._is_kl = False
        self._history = History(device)
        self._bounds = torch.full((num_steps,), math.inf, dtype=torch.float64, device=device)

    def bounds(self, steps: Tensor) -> Tensor:
        """Returns the bound at each position in the schedule, float64, [b, t]."""
        return self._bounds[steps]

    def observe(
        self, batch: DiffusionBatch, log_probs: Tensor, gaussian: GaussianSteps | None
    ) -> None:
        """Notes what the loss compared with its bound before any update.

        The log-probs are those of the training graph, [b, t], and so are the steps, None if the
        loss does not read them.
        """
        log_ratio = log_probs.detach().double() - require_rollout_log_probs(batch)
        if gaussian is not None:
            gaussian = gaussian.detached()
            if self._centered:
                assert gaussian.centered is not None
                log_ratio = gaussian.centered.double()
        steps = steps_of(self._loss, gaussian, centered=self._centered)
        bound = self._loss.bound(log_ratio, steps, convention=batch.spec.log_prob_convention)
        assert bound is not None
        self._is_kl = bound.is_kl
        self._least = bound.reference
        # As the loss will see it: |ratio - 1|, or the KL itself.
        sizes = bound.values if bound.is_kl else torch.expm1(bound.values).abs()
        # A median leaves nan out, while inf or 0 would move it.
        self._history.add(batch.step_indices, torch.where(sizes.isfinite(), sizes, torch.nan))

    def finish(self, gather: Gather) -> None:
        """Ends an iteration: the bounds take in what all processes have seen."""
        self._history.finish(gather)
        scale = self._deviations**2 if self._is_kl else self._deviations * ROBUST
        bounds = []
        for step in range(len(self._bounds)):
            sizes = self._history.of_step(step)
            # On the device: a bool here would make the host wait for every step.
            warm = torch.isfinite(sizes).sum() >= WARM_UP
            bound = (scale * torch.nanquantile(sizes, 0.5)).clamp(min=self._least)
            bounds.append(torch.where(warm, bound, math.inf))
        self._bounds = torch.stack(bounds)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the observations that the bounds follow, for a checkpoint."""
        return self._history.tensors(_NAME) | {f"{_NAME}.bounds": self._bounds}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes back to the observations and bounds that `tensors` recorded."""
        self._history.load(tensors, _NAME)
        self._bounds = tensors[f"{_NAME}.bounds"].to(self._bounds)

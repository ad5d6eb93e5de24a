"""The contract of a policy loss. One file in this folder is one loss; one of yours is named by
its full path.

Legend: B samples, T steps (denoising steps of an image, tokens of a response); b and t those of one
forward.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce, identity
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.correct import normalisation

DIFFUSION_KEY = "actor.diffusion_loss"
TOKEN_KEY = "actor.token_loss"
# Bounds of the published recipes, which are the defaults of the configuration: clip_ratio by the
# convention of the log-probs (`core.transition.CONVENTIONS`), and kl_threshold.
REFERENCE_CLIP = {"gaussian": 1e-4, "peers": 1e-5}
REFERENCE_KL_THRESHOLD = 1e-5


class PolicyLoss(NamedTuple):
    """The loss of each step, before weights and mean."""

    values: Tensor  # [B, T], differentiable; 0 without gradient where a step is not kept
    metrics: MetricBag  # names without prefix; a run reports them as `actor/NAME`


class LossBound(NamedTuple):
    """A quantity that a loss compares with one of its options at every step.

    A calibration sets the option above the values that the mismatch alone produces.
    """

    option: str  # such as clip_ratio
    value: float | Tensor  # its configured value; of each step, [B, T], if it follows the mismatch
    reference: float  # its value in the published recipe
    what: str  # the quantity in words, such as "the mismatch"
    # [B, T] float64; a log-ratio, whose |exp(log_ratio) - 1| the option bounds, or a KL, which it
    # bounds itself. A KL grows with the square of a movement.
    values: Tensor
    is_kl: bool = False


class ImageLoss(ABC):
    """Says what a loss of images needs. Its base class says what it trains on: `DiffusionLoss`
    on the denoising steps of a rollout, `ForwardLoss` on finished samples with noise added.

    The keyword parameters of the constructor are the options under `actor.diffusion_loss`, as
    `DiffusionLoss` says.

    Attributes:
      needs_means, needs_density, own_ratio, tolerates_mismatch: as in `DiffusionLoss`.
    """

    needs_means: ClassVar[bool] = False
    needs_density: ClassVar[bool] = False
    own_ratio: ClassVar[str] = ""
    tolerates_mismatch: ClassVar[bool] = False

    @property
    def clip_band(self) -> float | Tensor | None:
        """Half-width of the PPO band on a step's own ratio, exp(log_prob - old_log_prob); None if
        the loss has no such band.
        """
        return None

    @abstractmethod
    def __call__(self, *compared: Any) -> PolicyLoss:
        """Computes the loss of each step or noise level; the base classes say of what."""


class DiffusionLoss(ImageLoss):
    """The policy loss of denoising steps.

    The keyword parameters of the constructor are the options under `actor.diffusion_loss`. Those
    called `clip_ratio` and `kl_threshold` get the values of these keys, which are tensors, [B, T],
    if they are `auto:k`, with a loss of its own for every forward; all others are the loss's own,
    with their defaults in the class.

    Attributes:
      needs_means: whether the loss compares the means of the current policy's steps with those of
        the old policy. Rollouts and recomputes then keep them, and `gaussian.kl` is there.
      needs_density: whether the loss adds a KL to log-probs, which must then be log-densities
        (`rollout.algo.log_prob_convention=gaussian`).
      own_ratio: what the loss compares in place of the log-ratio, in words; else empty.
      tolerates_mismatch: whether the gradient in bypass mode is nearly right however large the
        mismatch is. A calibration then stays in bypass mode, however wide the bound has to be.
    """

    @abstractmethod
    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        """Computes the loss of each step.

        Weights, the mean over steps and the sum over micro-batches and processes are applied
        outside.

        Args:
          log_probs: log-probs of the current policy, mean over latent elements, [B, T];
            differentiable. If the correction is centered: its centered log-ratio to the rollout.
          old_log_probs: log-probs, or centered log-ratio, of the old policy, [B, T].
          advantages: advantage of the sample that each step belongs to, clipped to
            +- `adv_clip_max`, [B, T].
          keep_mask: bool, [B, T]; False where a step was rejected or does not exist. Log-probs may
            be infinite there, so such steps must be selected out (`core.reduce.select`) and not
            multiplied by 0.
          gaussian: standard deviations, step sizes and KLs of the steps, [B, T]; with a KL if
            `needs_means`, else possibly None. `steps_of` says which KL.

        Returns:
          The loss of each step, [B, T], and metrics.
        """

    def bound(
        self, mismatch: Tensor, gaussian: GaussianSteps | None, *, convention: str
    ) -> LossBound | None:
        """Returns what the loss bounds, for the mismatch that a calibration measured.

        This one is for a `clip_ratio` on the step's own ratio. A loss with another bound overrides
        it.

        Args:
          mismatch: log-ratio of the training graph to the rollout before any update, centered or
            not, [B, T] float64.
          gaussian: the steps, as in a call of the loss.
          convention: of the log-probs, `gaussian` or `peers`.

        Returns:
          The bound; None if the loss has none that a calibration could set.
        """
        if self.clip_band is None:
            return None
        reference = REFERENCE_CLIP[convention]
        return LossBound("clip_ratio", self.clip_band, reference, "the mismatch", mismatch)


def steps_of(
    loss: DiffusionLoss, gaussian: GaussianSteps | None, *, centered: bool
) -> GaussianSteps | None:
    """Returns the steps as a loss takes them.

    A loss that compares means gets the KL from the old policy. It is 0 for a loss that adds it to
    log-probs (`needs_density`) in order to center them, if they are centered already.

    Args:
      loss: the loss.
      gaussian: the policy's steps, [B, T]; None if nobody knows them.
      centered: whether the loss takes centered log-ratios.

    Returns:
      The steps, [B, T], with a KL only if the loss compares means.
    """
    if gaussian is None:
        return None
    kl = gaussian.kl if loss.needs_means else None
    # Adding the KL takes a bias away that a centered log-ratio does not have.
    if kl is not None and loss.needs_density and centered:
        kl = torch.zeros_like(kl)
    return GaussianSteps(gaussian.std, gaussian.dt, kl)


class Velocities(NamedTuple):
    """The velocities that a loss of the forward process compares.

        x_t = (1 - sigma) x + sigma e,   with a clean sample x and noise e

    The noise level sigma is [b, t], all others are [b, t, ...].
    """

    current: Tensor  # of the current policy; differentiable
    old: Tensor  # of the old policy
    target: Tensor  # e - x, which flow matching regresses on
    sigma: Tensor


class ForwardLoss(ImageLoss):
    """A loss of finished samples with noise added: of the forward process.

    It knows no log-prob, so there is no ratio, no clip and no mismatch. The rollout samples by the
    ODE, with the weights of the old policy, which follow those that are trained.

    Attributes:
      times: noise levels at which each sample is trained on, drawn from the schedule of the
        rollout; None for all of them.
    """

    times: int | None = None

    @abstractmethod
    def __call__(self, velocities: Velocities, advantages: Tensor) -> PolicyLoss:
        """Computes the loss of each sample and noise level.

        The mean and the sum over micro-batches and processes are applied outside, and so is the
        factor `adv_clip_max`.

        Args:
          velocities: of the current and the old policy, [b, t, ...].
          advantages: advantage of the sample, over `adv_clip_max`, within +-1, [b, t].

        Returns:
          The loss, [b, t], and metrics.
        """

    @abstractmethod
    def old_decay(self, updates: int) -> float:
        """Returns how much of itself the old policy keeps at the end of an iteration.

            old := decay old + (1 - decay) current

        Args:
          updates: optimizer updates of the run so far.
        """


class TokenLoss(ABC):
    """The policy loss of tokens.

    The keyword parameters of the constructor are the options under `actor.token_loss`. Those called
    `clip_ratio_low`, `clip_ratio_high` and `clip_ratio_c` get the values of these keys; all others
    are the loss's own, with their defaults in the class.
    """

    @property
    def clip_band(self) -> float | None:
        """The narrower half-width of the PPO band on a token's own ratio; None if the loss has no
        such band.
        """
        return None

    @abstractmethod
    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
    ) -> PolicyLoss:
        """Computes the loss of each token.

        Args:
          log_probs: log-probs of the current policy, [B, T]; differentiable.
          old_log_probs: log-probs of the old policy, [B, T].
          advantages: advantage of the response that each token belongs to, [B, T].
          keep_mask: bool, [B, T]; False where a token was rejected or is padding. Select, as in
            `DiffusionLoss`.

        Returns:
          The loss of each token, [B, T], and metrics.
        """


class LossTerms(NamedTuple):
    """A loss that adds up over micro-batches and processes.

    Sum the totals, and divide once by the denominator of the summed `counts`.
    """

    total: Tensor  # sum of the loss, scalar, differentiable
    share: Tensor  # how much each step counts in it, [B, T]
    counts: Tensor  # what `denominator` needs, [3] float64: see `counts`
    metrics: MetricBag  # names without prefix
    keep_mask: Tensor  # bool, the steps that were not rejected, [B, T]
    weights: Tensor | None  # what the loss of each step was multiplied by, [B, T]


def counts(number: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes what `denominator` needs; it adds up over micro-batches and processes.

    Args:
      number: number of steps or sequences that the loss is the sum of, float64 scalar.
      weights: sum and number of weights that are still to be divided by their mean, [2] float64;
        None if there are none.

    Returns:
      The three, [3] float64.
    """
    return torch.cat([number.unsqueeze(0), number.new_zeros(2) if weights is None else weights])


def denominator(summed: Tensor, all_reduce: AllReduce = identity) -> Tensor:
    """Computes what the sum of the losses is divided by.

        number * mean weight

    Args:
      summed: sum of `LossTerms.counts` over the micro-batches, [3] float64.
      all_reduce: adds up a tensor over processes.

    Returns:
      The number of steps or sequences of all processes, times the mean weight where weights are
      still to be divided by it; float64 scalar. 1 where nothing counts, so that the loss is 0.
    """
    # The one division of a mini-batch comes at its end: means of micro-batches or processes would
    # count steps differently, depending on how the batch is cut.
    number, weight_total, weight_count = all_reduce(summed)
    mean_weight = torch.where(
        weight_count > 0, normalisation(weight_total, weight_count), torch.ones_like(number)
    )
    return torch.where(number > 0, number * mean_weight, torch.ones_like(number))

"""A model as a stochastic policy: what the update needs from it, for images and text alike.

Legend:
    B, T  samples and steps of a whole batch
    b, t  samples of a micro-batch, and steps that one forward evaluates

A micro-batch is a few rows of a batch. One forward may evaluate only some of its steps, so the
policy cuts it into pieces: a flow policy into one or several steps each, a token policy not at all.
A loss may have to see less at once than a forward evaluates, which `steps` is for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.transition import GaussianSteps

if TYPE_CHECKING:
    from flowgrpo_rc.models.base import TrainableModel


class Evaluation(NamedTuple):
    """A policy on recorded steps.

    `Policy.evaluate` gives it for one piece, differentiable in the weights, and `Policy.measure`
    for a whole batch, as numbers without gradient. `join` puts those of several pieces together.
    Without Gaussian steps there are log-probs alone.
    """

    log_probs: Tensor  # of each step, [b, t], in nats; arbitrary at padding
    gaussian: GaussianSteps | None = None  # of the steps, [b, t]
    means: Tensor | None = None  # their means, [b, t, ...]; None if they were not kept

    def detached(self, *, keep_means: bool = False) -> "Evaluation":
        """Returns the same numbers without gradient.

        Args:
          keep_means: keep the means too. They are as large as the latents.
        """
        gaussian = None if self.gaussian is None else self.gaussian.detached()
        means = self.means.detach() if keep_means and self.means is not None else None
        return Evaluation(self.log_probs.detach(), gaussian, means)

    @property
    def step_kl(self) -> Tensor | None:
        """Returns the exact KL of each step from the old policy, [B, T], in nats.

        The old policy is the rollout's if the batch holds the means of no other. None if the batch
        holds no means.
        """
        return None if self.gaussian is None else self.gaussian.kl

    @property
    def centered(self) -> Tensor | None:
        """Returns the centered log-ratio of each step to the rollout, [B, T].

        None if the batch does not hold the means of the rollout.
        """
        return None if self.gaussian is None else self.gaussian.centered


B = TypeVar("B", bound=Batch)
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Policy(ABC, Generic[B]):
    """A stochastic policy around a network. Several policies may share one model."""

    model: "TrainableModel"
    network: nn.Module  # what is evaluated and trained
    _: KW_ONLY
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # what the network runs in
    _nudged = False  # whether the embeddings go through `nudge`

    @abstractmethod
    def pieces(self, micro: B) -> Iterator[B]:
        """Cuts a micro-batch into the parts that one forward evaluates.

        Args:
          micro: the micro-batch, [b, T].

        Returns:
          Parts of all rows, [b, t], in the order of their steps. Together they hold every step
          once.
        """

    def order(self, batch: B, mini_batch_size: int) -> Tensor | None:
        """Finds an order in which rows that share a forward are alike.

        Args:
          batch: the recorded steps, [B, T].
          mini_batch_size: rows of an update; they stay together.

        Returns:
          Positions of the rows, int64, [B]; None: they stay as they are.
        """
        return None

    @abstractmethod
    def evaluate(self, piece: B) -> Evaluation:
        """Evaluates this policy on the recorded steps of one piece.

        Args:
          piece: a part of a micro-batch, [b, t], as `pieces` gives it.

        Returns:
          The evaluation, differentiable in the weights.
        """

    @abstractmethod
    def steps(self, piece: B, now: Evaluation) -> Iterator[tuple[B, Evaluation]]:
        """Cuts an evaluated piece into what a loss sees at once.

        So a loss of single steps gives the same however many of them one forward evaluates.

        Args:
          piece: the recorded steps, [b, t].
          now: what was found on them, [b, t].

        Returns:
          Pairs of both, in the order of the steps: a flow policy's of one step each, [b, 1], a
          token policy's of all tokens.
        """

    @abstractmethod
    def divergence(self, now: Evaluation, reference: Evaluation, piece: B) -> Tensor:
        """Estimates KL(now | reference) at each step.

        Args:
          now: the current policy on the piece.
          reference: the reference policy on the piece.
          piece: the recorded steps, [b, t].

        Returns:
          The estimate, [b, t], in nats; differentiable in `now`.
        """

    @abstractmethod
    def cells(self, batch: B) -> Tensor:
        """Returns the cell of each step. The steps of one cell share the scale of their mismatch.

        Statistics of the mismatch are taken cell by cell.

        Args:
          batch: the recorded steps, [B, T].

        Returns:
          int64, [B, T]; indices into `cell_names`.
        """

    @abstractmethod
    def cell_names(self, batch: B) -> Sequence[str]:
        """Returns the name of each cell, as metrics use it.

        Args:
          batch: any batch of the run.

        Returns:
          The names in the order of the cells. An empty name: the cell gets no metric of its own.
        """

    def rounded_otherwise(
        self, autocast: Callable[[], AbstractContextManager[object]] | None = None
    ) -> Self:
        """Returns a policy that shares the network, and differs from this one by rounding alone.

        Args:
          autocast: makes another context in which the network runs. None: the embeddings go
            through `nudge`, for weights in bf16, where another autocast changes nothing.
        """
        other = copy(self)
        other.autocast = autocast or self.autocast
        other._nudged = autocast is None
        return other

    @torch.no_grad()
    def measure(self, batch: B, micro_batch_size: int, *, keep_means: bool = False) -> Evaluation:
        """Evaluates this policy on a whole batch, without gradient.

        Args:
          batch: the recorded steps, [B, T].
          micro_batch_size: rows of one forward.
          keep_means: keep the means of the Gaussians too.

        Returns:
          The policy on every step, [B, T].
        """
        rows = []
        # In the shapes of the update's forwards: products in another shape round otherwise.
        for micro in batch.split(micro_batch_size):
            pieces = self.pieces(micro)
            columns = [self.evaluate(piece).detached(keep_means=keep_means) for piece in pieces]
            rows.append(join(columns, dim=1))
        return join(rows, dim=0)

    def log_probs(self, batch: B, micro_batch_size: int) -> Tensor:
        """Computes the log-probabilities of a whole batch, without gradient.

        Args:
          batch: the recorded steps, [B, T].
          micro_batch_size: rows of one forward.

        Returns:
          Log-probabilities, [B, T], in nats; arbitrary at padding.
        """
        return self.measure(batch, micro_batch_size).log_probs


def nudge(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Moves each value up or down at random, by about one unit in the last place of `dtype`.

        moved = values (1 + sign eps / 2),   eps = finfo(dtype).eps

    A network that is given moved inputs rounds differently everywhere. How far its outputs move is
    the size that rounding alone gives to a mismatch.

    Args:
      values: of any shape; rounded to `dtype` first.
      dtype: the precision whose unit counts.

    Returns:
      The moved values in `dtype`. Equal shapes get equal signs, so the result repeats.
    """
    # Its own generator: a draw of the global one would depend on what ran before.
    source = torch.Generator().manual_seed(0)
    signs = (2 * torch.randint(2, values.shape, generator=source) - 1).to(values.device)
    # In fp32, since the factor has one digit more than `dtype` holds.
    return (values.to(dtype).float() * (1 + signs * torch.finfo(dtype).eps / 2)).to(dtype)


def cut(whole: T, step: int) -> T:
    """Returns one step of what was found on several steps, the inverse of `join` along `dim=1`.

    Args:
      whole: a NamedTuple whose fields are [b, t, ...], None, or such tuples again.
      step: which of the steps.

    Returns:
      The same with fields [b, 1, ...].
    """
    if isinstance(whole, tuple):
        return type(whole)(*(cut(column, step) for column in whole))
    return cast(T, whole[:, step : step + 1]) if isinstance(whole, Tensor) else whole


def join(pieces: Sequence[T], dim: int) -> T:
    """Joins what was found on several parts of a batch into one.

    Each field is joined with the same field of the other parts. A field that is None, which it is
    in all parts, stays None.

    Args:
      pieces: one `Evaluation` of each part, in order.
      dim: 0 to put rows below each other, 1 to put steps side by side.

    Returns:
      One `Evaluation` of the whole.
    """
    first = pieces[0]
    # A NamedTuple, such as `Evaluation` and the `GaussianSteps` in it: join field by field.
    if isinstance(first, tuple):
        return type(first)(*(join(column, dim) for column in zip(*pieces, strict=True)))
    if not isinstance(first, Tensor):
        return first
    return cast(T, torch.cat(cast("list[Tensor]", list(pieces)), dim))

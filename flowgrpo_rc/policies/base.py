"""A model seen as a stochastic policy: what the update needs to know about it, whatever it makes.

Legend: b rows of a micro-batch, t steps that one forward evaluates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.transition import GaussianSteps


class Evaluation(Protocol):
    """The policy on recorded steps; differentiable."""

    @property
    def log_probs(self) -> Tensor:
        """[b, t]; whatever at steps that are not valid."""

    @property
    def gaussian(self) -> GaussianSteps | None:
        """[b, t]; None where steps are no Gaussians."""

    @property
    def means(self) -> Tensor | None:
        """Of the Gaussians [b, t, ...]."""


class Measured(NamedTuple):
    """A policy on all steps of a batch [B, T], without gradient; means [B, T, ...] where they were
    asked for.
    """

    log_probs: Tensor
    gaussian: GaussianSteps | None
    means: Tensor | None

    @classmethod
    def of(cls, now: Evaluation, *, keep_means: bool = False) -> Measured:
        """An evaluation [b, t], detached."""
        gaussian, means = now.gaussian, now.means if keep_means else None
        if gaussian is not None and gaussian.kl is not None:
            gaussian = gaussian._replace(kl=gaussian.kl.detach())
        return cls(now.log_probs.detach(), gaussian, None if means is None else means.detach())

    @property
    def step_kl(self) -> Tensor | None:
        """Exact KL from the means that the batch holds; None where it holds none."""
        return None if self.gaussian is None else self.gaussian.kl


B = TypeVar("B", bound=Batch)
E = TypeVar("E", bound=Evaluation)


class Policy(ABC, Generic[B, E]):
    """`network` is what is trained. Several policies (the trainer's, the engine's) may share one
    model.
    """

    network: Any

    @abstractmethod
    def pieces(self, micro: B) -> Iterator[B]:
        """The parts of a micro-batch that one forward evaluates, in order; together they are all of
        its steps.
        """

    @abstractmethod
    def evaluate(self, piece: B) -> E:
        """This policy on the recorded steps of one piece."""

    @abstractmethod
    def divergence(self, now: E, reference: E, piece: B) -> Tensor:
        """Estimate of KL(now | reference) at each step [b, t]; differentiable in `now`."""

    @abstractmethod
    def cells(self, batch: B) -> Tensor:
        """The cell [b, t] int64 of each step; steps of one cell share the scale of their
        mismatch.
        """

    @abstractmethod
    def cell_names(self, batch: B) -> Sequence[str]:
        """Of all cells, in order, on the host; empty for a cell that is no curve of its own."""

    @abstractmethod
    def under(self, autocast: Callable[[], AbstractContextManager[Any]]) -> Policy[B, E]:
        """This policy with another autocast around its network."""

    @abstractmethod
    def nudged(self) -> Policy[B, E]:
        """This policy with the embeddings that its network is given moved as by `nudge`, in the
        network's dtype.
        """

    @torch.no_grad()
    def measure(self, batch: B, micro_batch_size: int, *, keep_means: bool = False) -> Measured:
        """This policy on the whole batch, without gradient."""
        rows = []
        for start in range(0, len(batch), micro_batch_size):
            pieces = self.pieces(batch.rows(start, start + micro_batch_size))
            found = [Measured.of(self.evaluate(piece), keep_means=keep_means) for piece in pieces]
            rows.append(join(found, dim=1))
        return join(rows, dim=0)

    def log_probs(self, batch: B, micro_batch_size: int) -> Tensor:
        """Log-probabilities [B, T] of the whole batch, without gradient."""
        return self.measure(batch, micro_batch_size).log_probs


def nudge(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` by one unit in the last place of `dtype` up or down at random, the same ones
    whenever the shape is.
    """
    source = torch.Generator().manual_seed(0)
    signs = (2 * torch.randint(2, values.shape, generator=source) - 1).to(values.device)
    return (values.to(dtype).float() * (1 + signs * torch.finfo(dtype).eps / 2)).to(dtype)


def join(parts: Sequence[Any], dim: int) -> Any:
    """What was `Measured` of all parts, side by side: a tuple's fields each for itself, and None
    stays None.
    """
    first = parts[0]
    if isinstance(first, tuple):
        return type(first)(*(join(column, dim) for column in zip(*parts, strict=True)))
    return None if first is None else torch.cat(list(parts), dim)

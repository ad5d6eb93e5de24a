"""A model seen as a stochastic policy: what the update needs to know about it, whatever it makes.

Legend: b rows of a micro-batch, t steps that one forward evaluates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag


class Evaluation(Protocol):
    """The policy on recorded steps; differentiable."""

    @property
    def log_probs(self) -> Tensor:
        """[b, t]; whatever at steps that are not valid."""


B = TypeVar("B", bound=Batch)
E = TypeVar("E", bound=Evaluation)


class Policy(ABC, Generic[B, E]):
    """`network` is what is trained. Several policies (the trainer's, the engine's) may share one model."""

    network: Any

    @abstractmethod
    def pieces(self, micro: B) -> Iterator[B]:
        """The parts of a micro-batch that one forward evaluates, in order; together they are all of its steps."""

    @abstractmethod
    def evaluate(self, piece: B) -> E:
        """This policy on the recorded steps of one piece."""

    @abstractmethod
    def divergence(self, now: E, reference: E, piece: B) -> Tensor:
        """Estimate of KL(now | reference) at each step [b, t]; differentiable in `now`."""

    @abstractmethod
    def mismatch(self, difference: Tensor, piece: B) -> MetricBag:
        """How training - rollout log-probs [b, t] differ along the trajectory, beyond what holds for every policy."""

    @torch.no_grad()
    def log_probs(self, batch: B, micro_batch_size: int) -> Tensor:
        """Log-probabilities [B, T] of the whole batch, without gradient."""
        rows = []
        for start in range(0, len(batch), micro_batch_size):
            micro = batch.rows(start, start + micro_batch_size)
            rows.append(torch.cat([self.evaluate(piece).log_probs for piece in self.pieces(micro)], 1))
        return torch.cat(rows)

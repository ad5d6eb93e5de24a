"""What an algorithm is. A folder beside this file holds one, with all that no other one needs.

The trainer gives an algorithm the samples of an iteration and asks it for losses. It does not know
what they are made of: ratios of log-probs (`policy_gradient`), or velocities at finished samples
(`diffusion_nft`). Optimizer, clipping of gradients, average, KL penalty and checks of numbers are
the update's, `training/update.py`, and the same for all. The calls of one iteration, in order:

    begin           the whole batch, while its rewards are still being scored
    before_update   its mini-batches, with advantages
    loss            each mini-batch, once in every epoch
    finish          the end of the iteration

`build.algorithm` chooses the algorithm of a run.

Legend: b rows of a micro-batch, t steps that one forward evaluates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.monitoring.decisions import Decisions

B = TypeVar("B", bound=Batch)
P = TypeVar("P", bound=Batch, contravariant=True)
E = TypeVar("E")


class TrainingGraph(Protocol[P, E]):
    """The network as an algorithm evaluates it; a `policies.base.Policy` is one."""

    network: Any  # what is evaluated and trained

    def evaluate(self, piece: P) -> E:
        """Evaluates recorded steps, [b, t], in one forward; differentiable in the weights."""

    def divergence(self, now: E, reference: E, piece: P) -> Tensor:
        """Returns how far two evaluations of a piece are apart, [b, t]; differentiable in `now`."""


class Forward(NamedTuple):
    """One forward of the training graph, and the loss that is differentiated through it."""

    piece: Batch  # what was evaluated, [b, t]
    now: object  # what the graph says of it
    total: Tensor  # sum of the loss over the steps, scalar, before any division
    share: Tensor  # how much each step counts in it, [b, t]; a penalty on steps counts likewise


# Adds the gradient of a forward to that of the mini-batch, and frees its graph.
Backward = Callable[[Forward], None]


class Algorithm(ABC, Generic[B]):
    """Turns samples with advantages into gradients."""

    policy: TrainingGraph[Any, Any]
    decisions: Decisions | None = None  # of a correction in this iteration; None without one
    auto_bands: AutoBands | None = None  # criteria that follow the mismatch, if there are any

    @abstractmethod
    def begin(self, batch: B, step: int) -> B:
        """Returns the samples of this process with what can be known before rewards and updates.

        Iterations count from 1.
        """

    def before_update(self, minis: Sequence[B]) -> list[B]:
        """Returns the mini-batches with all that must be known before the first update."""
        return list(minis)

    @abstractmethod
    def loss(
        self, mini: B, backward: Backward, metrics: MetricBag, *, updates: int
    ) -> tuple[B, Tensor]:
        """Computes the loss of a mini-batch, and has each of its forwards differentiated.

        Args:
          mini: samples with advantages, in the order of their rows.
          backward: to be called with each forward before the next one, so that memory holds one
            graph at a time.
          metrics: takes in metrics, names without prefix.
          updates: how many updates of the iteration came before.

        Returns:
          The mini-batch as later epochs take it, and what the sum of the losses is divided by, [3]
          float64: see `losses.base.denominator`.
        """

    @abstractmethod
    def finish(self, metrics: MetricBag) -> None:
        """Ends the iteration. Adds metrics, full names."""

    def sampling_weights(self, current: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the LoRA to sample with: the one that is trained, `current`, by name."""
        return current

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns the algorithm's part of a checkpoint: stem of a file -> name -> tensor."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes back to what `tensors` of a checkpoint recorded, bit for bit."""

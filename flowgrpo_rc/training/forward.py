"""The mode of losses that train on finished samples: no log-probs, no correction, no mismatch.

The old policy is an average of the LoRA. It samples, and the loss compares the current policy with
it.

Legend: b rows of a micro-batch, t noise levels that one forward evaluates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.base import ForwardLoss, Velocities
from flowgrpo_rc.models.lora import lora_parameters, other_weights
from flowgrpo_rc.policies.base import Measured
from flowgrpo_rc.policies.forward import ForwardPolicy
from flowgrpo_rc.records.checkpoint import check_tensors
from flowgrpo_rc.training.modes import Mode, Seen

# Names in a checkpoint.
_OLD = "old_policy"
_COUNTS = "old_policy_counts"


@dataclass(kw_only=True, eq=False)
class Forward(Mode):
    """Gives finished samples their noise levels, and the loss the velocities of the old policy.

    Attributes:
      loss: says how many noise levels a sample has, and how the old policy follows.
    """

    prefix: ClassVar[str] = "actor"
    old_is_rollout: ClassVar[bool] = True
    policy: ForwardPolicy
    loss: ForwardLoss
    _updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Starts with the LoRA that the network has."""
        self._current = lora_parameters(self.policy.network)
        self._old = {name: p.detach().clone() for name, p in self._current.items()}

    def begin(self, batch: Any, step: int) -> Batch:
        """Returns the finished samples with the noise levels that they are trained on."""
        return self.policy.noised(batch, self.loss.times)

    def before_update(self, minis: Sequence[Batch]) -> list[Batch]:
        """Returns the mini-batches as they are: each forward asks the old policy itself."""
        return list(minis)

    def enter(self, piece: Any, now: Any, *, updates: int) -> tuple[Batch, Velocities]:
        """Returns the piece, and the velocities of both policies."""
        with torch.no_grad(), other_weights(self._current, self._old):
            old = self.policy.evaluate(piece)
        sigma = piece.sigmas[piece.step_indices]
        return piece, Velocities(now.means, old.means, now.target, sigma)

    def leave(self, batch: Batch, old: Measured) -> Batch:
        """Returns the mini-batch as it is, and counts its update."""
        self._updates += 1
        return batch

    def observe(self, seen: Seen, *, updated: bool) -> None:
        """Notes nothing: nothing is rejected, and there is no mismatch."""

    def sampling_weights(self, current: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the old policy."""
        return self._old

    def finish(self, metrics: MetricBag) -> None:
        """Ends the iteration: the old policy follows the current one."""
        decay = self.loss.old_decay(self._updates)
        for name, old in self._old.items():
            old.lerp_(self._current[name].detach(), 1 - decay)
        metrics.max(f"{self.prefix}/old_decay", torch.tensor(decay, dtype=torch.float64))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint holds: the old policy, and how many updates there were."""
        updates = torch.tensor(self._updates, dtype=torch.float64)
        return {_OLD: dict(self._old), _COUNTS: {"updates": updates}}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes back to what `tensors` recorded."""
        for name, tensor in check_tensors(_OLD, tensors[_OLD], self._old).items():
            self._old[name].copy_(tensor)
        self._updates = int(tensors[_COUNTS]["updates"])

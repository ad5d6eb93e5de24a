"""Training on finished samples with noise added: no log-probs, no correction, no mismatch.

The old policy is an average of the LoRA. It samples, and the loss compares the current policy with
it.

Legend: B samples, T noise levels of each; b and t those of one forward.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.algorithm import Algorithm, Backward, Forward
from flowgrpo_rc.algorithms.diffusion_nft.graph import Matching, VelocityGraph
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.losses.base import ForwardLoss, Velocities, counts
from flowgrpo_rc.models.lora import lora_parameters, other_weights
from flowgrpo_rc.records.checkpoint import check_tensors

# Names in a checkpoint.
_OLD = "old_policy"
_COUNTS = "old_policy_counts"


class ForwardProcess(Algorithm[DiffusionBatch]):
    """Trains on a `ForwardLoss`; its old policy follows the LoRA.

    Advantages are clipped to +- `adv_clip_max`, and the loss sees their share of it.
    """

    policy: VelocityGraph

    def __init__(
        self,
        policy: VelocityGraph,
        loss: ForwardLoss,
        *,
        adv_clip_max: float,
        micro_batch_size: int,
    ) -> None:
        self.policy = policy
        self._loss = loss
        self._adv_clip_max = adv_clip_max
        self._micro_batch_size = micro_batch_size
        self._updates = 0
        self._current = lora_parameters(policy.network)
        self._old = {name: p.detach().clone() for name, p in self._current.items()}

    def begin(self, batch: DiffusionBatch, step: int) -> DiffusionBatch:
        """Returns the finished samples with the noise levels that they are trained on."""
        return self.policy.noised(batch, self._loss.times)

    def loss(
        self, mini: DiffusionBatch, backward: Backward, metrics: MetricBag, *, updates: int
    ) -> tuple[DiffusionBatch, Tensor]:
        """Computes the mean loss over samples and noise levels, times `adv_clip_max`."""
        number = torch.zeros((), dtype=torch.float64, device=mini.group.device)
        for micro in mini.split(self._micro_batch_size):
            for piece in self.policy.pieces(micro):
                now = self.policy.evaluate(piece)
                values = self._values(piece, now, metrics)
                total = self._adv_clip_max * values.sum()
                metrics.ratio("pg_loss", total, number.new_full((), values.numel()))
                backward(Forward(piece, now, total, torch.ones_like(values)))
                number = number + values.numel()
        self._updates += 1
        return mini, counts(number)

    def _values(self, piece: DiffusionBatch, now: Matching, metrics: MetricBag) -> Tensor:
        """Computes the loss of each sample and noise level, [b, t]."""
        # The same transformer with the old LoRA put in: a second one would double the memory.
        with torch.no_grad(), other_weights(self._current, self._old):
            old = self.policy.evaluate(piece)
        sigma = piece.sigmas[piece.step_indices]
        assert piece.advantages is not None
        shares = (piece.advantages / self._adv_clip_max).clamp(-1, 1).to(now.velocity.dtype)
        velocities = Velocities(now.velocity, old.velocity, now.target, sigma)
        found = self._loss(velocities, shares)
        metrics.merge(found.metrics)
        return found.values

    def finish(self, metrics: MetricBag) -> None:
        """Ends the iteration: the old policy follows the current one."""
        decay = self._loss.old_decay(self._updates)
        for name, old in self._old.items():
            old.lerp_(self._current[name].detach(), 1 - decay)
        metrics.max("actor/old_decay", torch.tensor(decay, dtype=torch.float64))

    def sampling_weights(self, current: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the old policy."""
        return self._old

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint holds: the old policy, and how many updates there were."""
        # A number travels as a tensor: a checkpoint holds nothing else.
        updates = torch.tensor(self._updates, dtype=torch.float64)
        return {_OLD: dict(self._old), _COUNTS: {"updates": updates}}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes back to what `tensors` recorded."""
        for name, tensor in check_tensors(_OLD, tensors[_OLD], self._old).items():
            self._old[name].copy_(tensor)
        self._updates = int(tensors[_COUNTS]["updates"])

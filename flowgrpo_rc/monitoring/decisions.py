"""The decisions of the correction in a step, sample by sample, kept until the step is over.

The loss adds references to tensors that exist already. Nothing is copied, computed or read back
while it runs.

Shapes: b rows, t steps that one decision was about.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch


class Decision(NamedTuple):
    """One decision of the correction about some samples; all but `seed` are [b, t]."""

    seed: Tensor  # which samples, [b] int64
    training_log_probs: Tensor
    rollout_log_probs: Tensor
    step_mask: Tensor  # the steps that exist
    keep_mask: Tensor  # the steps that were kept
    cells: Tensor  # `Policy.cells` of the steps
    step_kl: Tensor | None  # exact KL of each step, if the policy has one
    num_elements: int  # that a log-prob is the mean of

    @property
    def difference(self) -> Tensor:
        """Training minus rollout log-prob, [b, t] float64; undefined at steps that do not exist."""
        return self.training_log_probs.double() - self.rollout_log_probs

    @property
    def rejected(self) -> Tensor:
        """The steps that exist and were not kept, [b, t] bool."""
        return self.step_mask & ~self.keep_mask


class Decisions:
    """Collects the decisions of a step."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []

    def add(
        self,
        batch: Batch,
        training_log_probs: Tensor,
        cells: Tensor,
        keep_mask: Tensor,
        step_kl: Tensor | None,
    ) -> None:
        """Adds a decision about the samples of a batch."""
        assert batch.rollout_log_probs is not None
        self._decisions.append(
            Decision(
                seed=batch.seed,
                training_log_probs=training_log_probs.detach(),
                rollout_log_probs=batch.rollout_log_probs,
                step_mask=batch.step_mask,
                keep_mask=keep_mask,
                cells=cells,
                step_kl=None if step_kl is None else step_kl.detach(),
                num_elements=batch.num_elements,
            )
        )

    def take(self) -> list[Decision]:
        """Returns the decisions of the step that is over and starts anew."""
        decisions = self._decisions
        self._decisions = []
        return decisions


def worst_rejected(decisions: list[Decision], limit: int) -> list[tuple[Decision, int]]:
    """Returns at most `limit` samples with a rejected step, the largest |difference| first.

    A sample occurs once, as the decision and row with its largest difference. A difference that is
    not finite comes before all others. This waits for the device twice.
    """
    if not decisions:
        return []
    sizes = torch.cat([_rejected_size(decision) for decision in decisions])
    # More than asked for, since a sample can occur in several decisions.
    top = sizes.topk(min(len(sizes), 8 * limit))
    seeds = torch.cat([decision.seed for decision in decisions])[top.indices]
    places = [(decision, row) for decision in decisions for row in range(len(decision.seed))]
    worst: dict[int, tuple[Decision, int]] = {}
    columns = (column.tolist() for column in (top.values, top.indices, seeds))
    for size, index, seed in zip(*columns, strict=True):
        if size >= 0 and len(worst) < limit:
            worst.setdefault(seed, places[index])
    return list(worst.values())


def _rejected_size(decision: Decision) -> Tensor:
    """Returns the largest |difference| of each row's rejected steps, [b] float64.

    It is inf if one is not finite, and -1 if no step is rejected.
    """
    size = decision.difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    # A column of -1 keeps amax defined where there are no steps.
    nothing = torch.full_like(size[:, :1], -1.0)
    return torch.cat([nothing, torch.where(decision.rejected, size, -1.0)], 1).amax(1)

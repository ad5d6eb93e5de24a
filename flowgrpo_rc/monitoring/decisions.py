"""What the correction decided in a step, sample by sample, kept until the step is over.

The loss adds references to tensors that exist anyway; nothing is copied, computed or read back
while it runs.
Legend: b rows, t steps that one decision was about.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch


class Decision(NamedTuple):
    """Some samples as one decision saw them.

    seed [b] int64 says which samples; training, rollout: log-probs [b, t]; valid, kept [b, t] bool:
    the steps that exist, and those of them that stayed; cells [b, t] int64, `Policy.cells`; weights
    [b, t]: what the loss multiplies by, None without; step_kl [b, t] or None; num_elements: of
    which a log-prob is the mean; updated: after an update of this step.
    """

    seed: Tensor
    training: Tensor
    rollout: Tensor
    valid: Tensor
    kept: Tensor
    cells: Tensor
    weights: Tensor | None
    step_kl: Tensor | None
    num_elements: int
    updated: bool

    @property
    def difference(self) -> Tensor:
        """Training - rollout [b, t] float64; whatever at steps that do not exist."""
        return self.training.double() - self.rollout

    @property
    def rejected(self) -> Tensor:
        """[b, t] bool."""
        return self.valid & ~self.kept


class Decisions:
    """Collects them over a step."""

    def __init__(self) -> None:
        self._seen: list[Decision] = []

    def add(
        self,
        batch: Batch,
        log_probs: Tensor,
        cells: Tensor,
        kept: Tensor,
        weights: Tensor | None,
        step_kl: Tensor | None,
        *,
        updated: bool = False,
    ) -> None:
        """A decision about `batch` by the training graph's log-probs [b, t]."""
        assert batch.rollout_log_probs is not None
        self._seen.append(
            Decision(
                seed=batch.seed,
                training=log_probs.detach(),
                rollout=batch.rollout_log_probs,
                valid=batch.valid,
                kept=kept,
                cells=cells,
                weights=weights,
                step_kl=None if step_kl is None else step_kl.detach(),
                num_elements=batch.num_elements,
                updated=updated,
            )
        )

    def take(self) -> list[Decision]:
        """Those of the step that is over; another one begins."""
        seen = self._seen
        self._seen = []
        return seen


def worst_rejected(seen: list[Decision], limit: int) -> list[tuple[Decision, int]]:
    """The samples with a rejected step, those of the largest |difference| there first; at most
    `limit` of them.

    A sample stands here once, with the decision and the row that its largest difference is from.
    One that is not finite comes before all others. Waits for the device twice.
    """
    if not seen:
        return []
    sizes = torch.cat([_rejected_size(one) for one in seen])
    top = sizes.topk(min(len(sizes), 8 * limit))
    seeds = torch.cat([one.seed for one in seen])[top.indices]
    places = [(one, row) for one in seen for row in range(len(one.seed))]
    found: dict[int, tuple[Decision, int]] = {}
    for size, index, seed in zip(
        *(column.tolist() for column in (top.values, top.indices, seeds)), strict=True
    ):
        if size >= 0 and len(found) < limit:
            found.setdefault(seed, places[index])
    return list(found.values())


def _rejected_size(one: Decision) -> Tensor:
    """The largest |difference| of each row's rejected steps [b] float64, inf where it is not
    finite; -1 for none.
    """
    size = one.difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    nothing = torch.full_like(size[:, :1], -1.0)
    return torch.cat([nothing, torch.where(one.rejected, size, -1.0)], 1).amax(1)

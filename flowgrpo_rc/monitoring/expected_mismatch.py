"""What a pair of precisions explains of the mismatch between rollout and training graph.

Rounding is as large as the model, the guidance and the timestep make it, so the model is asked: its
training graph is evaluated twice on the recorded steps, as it trains and with bf16 autocast
switched over. Whatever an engine does wrong is in neither. What another precision than bf16 costs
is known relative to that.

Weights in bf16, which autocast leaves as they are, are evaluated a second time with their inputs
moved by one unit in the last place, so that what follows is rounded otherwise. That is what two
evaluations in bf16 differ by. It does not show what all of them have in common, by which a rollout
in another precision is off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.policies.base import Policy

EVERY = 100  # iterations after which the expectation is measured again
# Mean |difference| relative to that of autocast, measured on the bundled model; they add up in
# squares.
DTYPES = {"fp64": 0.0, "fp32": 0.0, "fp16": 0.13, "bf16": 1.0}
QUANTIZATIONS = {"int8": 0.75, "int8_dynamic": 1.9, "fp8": 3.5, "int4": 12.0}
# The least expectation: sums in another order move fp32 log-probs by 1e-8, and by 1e-7 where a
# cache is involved.
LEAST = {"diffusion": 4e-7, "causal_lm": 4e-6}


def relative_size(rollout: str, dtype: str, mixed_precision: str) -> float | None:
    """Of the mismatch that is expected, relative to what is measured; 0 for exact precisions, None
    where nothing can be
    measured: of weights in fp64, and of those in bf16 with a rollout in another precision.

    rollout: as in specs, `bf16+int8`; dtype and mixed_precision: of the training graph.
    """
    if dtype == "bf16":
        return 1.0 if rollout == "bf16" else None
    sampled, _, quantization = rollout.partition("+")
    parts = [DTYPES[sampled], QUANTIZATIONS[quantization] if quantization else 0.0]
    parts.append(0.0 if mixed_precision == "no" else 1.0)
    size = math.hypot(*parts)
    return size if dtype == "fp32" or size == 0 else None


class ExpectedMismatch:
    """Mean |difference| of each cell, measured in the first iteration, every `EVERY` after it, and
    where a sample is in a cell that none was in.

    other: the policy that is rounded otherwise; size: `relative_size`; least: the least
        expectation.
    """

    def __init__(
        self,
        policy: Policy[Any, Any],
        other: Policy[Any, Any],
        processes: Processes,
        *,
        size: float,
        least: float,
        micro_batch_size: int,
    ) -> None:
        self._policies = (policy, other)
        self._processes = processes
        self._size = size
        self._least = least
        self._micro_batch_size = micro_batch_size
        self._measured: Tensor | None = None

    def due(self, step: int, batch: Batch) -> bool:
        """Whether `measure` has to be called in this step, the same on all processes; the first is
        1. Never, where nothing is rounded."""
        if self._size == 0 or self._measured is None or step % EVERY == 1:
            return self._size > 0
        unknown = torch.isnan(self._measured)[self._policies[0].cells(batch)] & batch.valid
        return self._processes.any(bool(unknown.any()))

    def measure(self, batch: Batch, num_cells: int) -> None:
        """Two forwards of all samples, without gradient."""
        one, other = (
            policy.log_probs(batch, self._micro_batch_size).double() for policy in self._policies
        )
        known = batch.valid & torch.isfinite(one - other)
        total, count = self._processes.sum(
            by_cell(one - other, known, self._policies[0].cells(batch), num_cells)
        )
        before = torch.full_like(total, math.nan) if self._measured is None else self._measured
        self._measured = torch.where(count > 0, total / count, before)

    def values(self, like: Tensor) -> Tensor:
        """[C] for `like` [..., C]; nan for cells that no sample was in."""
        least = torch.full_like(like[0], self._least)
        return (
            least
            if self._measured is None
            else (self._size * self._measured).clamp(min=self._least)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._measured is None else {"measured": self._measured}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if "measured" in tensors:
            self._measured = tensors["measured"].to(self._processes.device)


def by_cell(difference: Tensor, known: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Sum of |difference| and number of observations [2, C] float64, of the known ones of [b,
    t].
    """
    numbers = torch.arange(num_cells, device=cells.device)
    here = (cells.flatten().unsqueeze(1) == numbers) & known.flatten().unsqueeze(1)
    sizes = torch.where(known, difference.abs(), 0.0).flatten().unsqueeze(1)
    return torch.stack([(sizes * here).sum(0), here.sum(0).double()])

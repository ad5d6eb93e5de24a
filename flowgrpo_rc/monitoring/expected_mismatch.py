"""The mismatch between rollout and training graph that a pair of precisions explains.

How large rounding errors are depends on the model, the guidance and the timestep, so they are
measured on the model. Its training graph is evaluated twice on the recorded steps: as it trains,
and with bf16 autocast switched over. A fault of an engine is in neither evaluation. What another
precision than bf16 costs is known relative to that.

Autocast does not change weights in bf16. Such a model is evaluated a second time with its inputs
moved by one unit in the last place, so that all that follows is rounded in another way. The
difference is that between two evaluations in bf16. It does not show the error that all of them have
in common, which matters for a rollout in another precision.

Shapes: b rows, t steps, C cells of the policy (`Policy.cells`).
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.policies.base import Policy

EVERY = 100  # iterations after which the expectation is measured again
# Mean |difference| relative to autocast's, measured on the bundled model. They add up in squares.
DTYPES = {"fp64": 0.0, "fp32": 0.0, "fp16": 0.13, "bf16": 1.0}
QUANTIZATIONS = {"int8": 0.75, "int8_dynamic": 1.9, "fp8": 3.5, "int4": 12.0}
# The least expectation: sums in another order move fp32 log-probs by 1e-8, and by 1e-7 where a
# cache is involved.
LEAST = {"diffusion": 4e-7, "causal_lm": 4e-6}
# Observations that a mean has to have. Images average over their dimensions. Tokens differ three
# times as much as their mean: of means over 50 healthy tokens one in five is above twice the
# expectation from 50 others, over 800 tokens one in 3000.
ENOUGH = {"diffusion": 1, "causal_lm": 800}


def relative_size(rollout: str, dtype: str, mixed_precision: str) -> float | None:
    """Returns the expected mismatch relative to the measured one.

    It is 0 for exact precisions and None if nothing can be measured: for weights in fp64, and for
    weights in bf16 with a rollout in another precision. `rollout` is a precision as in specs,
    `bf16+int8`; `dtype` and `mixed_precision` are those of the training graph.
    """
    if dtype == "bf16":
        return 1.0 if rollout == "bf16" else None
    sampled, _, quantization = rollout.partition("+")
    components = [DTYPES[sampled], QUANTIZATIONS[quantization] if quantization else 0.0]
    components.append(0.0 if mixed_precision == "no" else 1.0)
    # Independent errors add up in squares.
    size = math.hypot(*components)
    return size if dtype == "fp32" or size == 0 else None


def unquantized_share(rollout: str, dtype: str, mixed_precision: str) -> float | None:
    """Returns what is left of the expected mismatch if a quantization is not applied.

    None if the rollout is not quantized, or if nothing can be measured.
    """
    sampled, _, quantization = rollout.partition("+")
    size = relative_size(rollout, dtype, mixed_precision)
    plain = relative_size(sampled, dtype, mixed_precision)
    return plain / size if quantization and size and plain is not None else None


@dataclass(eq=False)
class ExpectedMismatch:
    """The mean |difference| of each cell that the precisions explain.

    It is measured in the first iteration, in the second, in which the LoRA is no longer zero, every
    `EVERY` iterations after these, and when a sample is in a cell that had none so far. A
    measurement goes on over further iterations until it has `enough` observations, as has what is
    compared with it.
    """

    policy: Policy[Any]
    other: Policy[Any]  # the same policy, rounded in another way
    processes: Processes
    _: KW_ONLY
    size: float  # from `relative_size`
    least: float  # the smallest expectation
    micro_batch_size: int
    enough: int = 1
    _measured: Tensor | None = field(default=None, init=False)
    _sums: Tensor | None = field(default=None, init=False)  # of a measurement that goes on

    def due(self, step: int, batch: Batch) -> bool:
        """Returns True if `measure` has to be called in this step, the same on all processes."""
        if self.size == 0:
            return False
        if self._measured is None or self._sums is not None or step % EVERY in (1, 2):
            return True
        unknown = torch.isnan(self._measured)[self.policy.cells(batch)] & batch.step_mask
        return self.processes.any(bool(unknown.any()))

    def measure(self, batch: Batch, num_cells: int) -> None:
        """Evaluates all samples twice, without gradient, and keeps the mean of each cell.

        With too few samples the means before stay, and the sums are kept for the next call.
        """
        log_probs = self.policy.log_probs(batch, self.micro_batch_size).double()
        difference = log_probs - self.other.log_probs(batch, self.micro_batch_size).double()
        known = batch.step_mask & torch.isfinite(difference)
        sums = self.processes.sum(by_cell(difference, known, self.policy.cells(batch), num_cells))
        if self._sums is not None:
            sums = self._sums + sums
        # Images always have enough: they need not wait for the device.
        if self.enough > 1 and sums[1].sum() < self.enough:
            self._sums = sums
            return
        self._sums = None
        total, count = sums
        before = torch.full_like(total, math.nan) if self._measured is None else self._measured
        self._measured = torch.where(count > 0, total / count, before)

    def values(self, like: Tensor) -> Tensor:
        """Returns the expectation of each cell [C]; nan for cells that had too few samples.

        `like` is a tensor [..., C] of the wanted device and dtype.
        """
        if self._measured is None:
            return torch.full_like(like[0], math.nan if self.size else self.least)
        return (self.size * self._measured).clamp(min=self.least)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint."""
        state = {"measured": self._measured, "sums": self._sums}
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the state from a checkpoint."""
        if "measured" in tensors:
            self._measured = tensors["measured"].to(self.processes.device)
        if "sums" in tensors:
            self._sums = tensors["sums"].to(self.processes.device)


def by_cell(difference: Tensor, known: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Returns sum of |difference| and number of known steps of each cell, [2, C] float64."""
    numbers = torch.arange(num_cells, device=cells.device)
    in_cell = (cells.flatten().unsqueeze(1) == numbers) & known.flatten().unsqueeze(1)
    sizes = torch.where(known, difference.abs(), 0.0).flatten().unsqueeze(1)
    return torch.stack([(sizes * in_cell).sum(0), in_cell.sum(0).double()])

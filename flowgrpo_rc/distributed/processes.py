"""The processes of a run, through accelerate: exact global statistics and one flat gradient
reduction.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import DistError


class ProcessLost(RuntimeError):
    """Another process of the run died or did not answer in time."""


class Processes:
    """Rank, device, autocast and reductions. With one process every reduction is the identity."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device

    def autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast()

    def sum(self, value: Tensor) -> Tensor:
        """Elementwise sum over processes."""
        return value if self.count == 1 else self.accelerator.reduce(value, reduction="sum")

    def max(self, value: Tensor) -> Tensor:
        """Elementwise maximum over processes."""
        return value if self.count == 1 else self.accelerator.gather(value.unsqueeze(0)).amax(0)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, each of which has as many."""
        return rows if self.count == 1 else self.accelerator.gather(rows)

    def gather_ragged(self, values: Tensor) -> Tensor:
        """The numbers [N] of all processes, which may have different numbers of them; nan fills
        up.
        """
        if self.count == 1:
            return values
        return self.accelerator.gather(
            self.accelerator.pad_across_processes(values, pad_index=math.nan)
        )

    def any(self, flag: bool) -> bool:
        """True if any process says so; every process must ask."""
        return (
            flag
            if self.count == 1
            else bool(self.max(torch.tensor([float(flag)], device=self.device)).item())
        )

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def rows_of_all(self, rows: Tensor, first: int, total: int) -> Tensor:
        """[total, ...] on the CPU, the same everywhere: this process brings rows first, first + 1,
        ... of it.

        Rows [k, ...] have the same shape on all processes, k aside; those beyond `total` are
        dropped.
        """
        rows = rows[: max(0, total - first)]
        whole = rows.new_zeros((total, *rows.shape[1:]))
        whole[first : first + len(rows)] = rows
        return self.sum(whole.to(self.device)).cpu()

    @contextmanager
    def noticing_losses(self) -> Iterator[None]:
        """ProcessLost in place of what the communication library raises where another process is
        gone or hangs.
        """
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, DistError) or "/gloo/" in str(error)):
                raise
            reason = (
                str(error).splitlines()[0].split("] ", 1)[-1].split(". This is typically", 1)[0]
            )
            raise ProcessLost(
                f"process {self.rank} of {self.count} cannot reach another one, which has failed "
                "(its own message says "
                "why), was killed, or kept the others waiting for longer than trainer.timeout_s. "
                "The same command goes "
                f"on from the last checkpoint. ({reason})"
            ) from error

    def close(self) -> None:
        """Leave the process group; for a run that ended well, since a failed process would wait for
        the others.
        """
        self.accelerator.state.destroy_process_group()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients over processes in one flat buffer; a parameter without one counts as zero.

        Losses are divided by global numbers of elements, so the sum is the gradient of the global
        mini-batch. LoRA gradients are small, and some tensors have none (the last block's context
        stream in SD3), which a DistributedDataParallel wrapper would refuse.
        """
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        torch._foreach_copy_(
            gradients,
            [
                part.view_as(gradient)
                for part, gradient in zip(
                    flat.split([g.numel() for g in gradients]), gradients, strict=True
                )
            ],
        )


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory so far in GiB: of the device for CUDA, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return peak / unit

"""The processes of a run, through accelerate: exact global statistics and a sum of gradients."""

import math
import re
import resource
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn
from torch.distributed import DistError

from flowgrpo_rc.distributed.memory import free_host_gib

T = TypeVar("T")
_PATIENCE_S = 30.0


class ProcessLost(RuntimeError):
    """Another process of the run died or did not answer in time."""


class Processes:
    """The processes of a run, seen from one of them; `is_main` writes files.

    Every process has to call a reduction, with tensors of the same shape unless it says otherwise.
    With one process a reduction returns its argument.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device
        if self.device == torch.device("cuda"):
            # A run of one process gets it; torch.cuda.set_device takes no device without a number.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._has_loaded = False
        # NCCL ends a process that waits for too long before Python can say who is missing.
        needs_gloo = self.count > 1 and distributed.get_backend() != "gloo"
        self._gloo = distributed.new_group(backend="gloo") if needs_gloo else None

    def sum(self, value: Tensor) -> Tensor:
        """Adds a tensor over the processes, element by element."""
        return value if self.count == 1 else self.accelerator.reduce(value, reduction="sum")

    def max(self, value: Tensor) -> Tensor:
        """Takes the maximum of a tensor over the processes, element by element."""
        return value if self.count == 1 else self.accelerator.gather(value.unsqueeze(0)).amax(0)

    def gather(self, rows: Tensor) -> Tensor:
        """Collects the rows of all processes, which have the same number of rows each."""
        return rows if self.count == 1 else self.accelerator.gather(rows)

    def gather_ragged(self, values: Tensor) -> Tensor:
        """Collects the numbers [N] of all processes, filled up with nan to the largest N."""
        if self.count == 1:
            return values
        padded = self.accelerator.pad_across_processes(values, pad_index=math.nan)
        return self.accelerator.gather(padded)

    def gather_objects(self, values: Sequence[T]) -> list[T]:
        """Collects what pickle can hold of all processes, each with a number of its own."""
        gathered: list[T] = list(values) if self.count == 1 else gather_object(list(values))
        return gathered

    def any(self, flag: bool) -> bool:
        """Returns True on all processes if the flag is True on one of them."""
        if self.count == 1:
            return flag
        return bool(self.max(torch.tensor([float(flag)], device=self.device)).item())

    def wait(self) -> None:
        """Waits until all processes have come here."""
        self.accelerator.wait_for_everyone()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Lets processes on GPUs load: the first of a machine, then as many as its host takes."""
        if self.count == 1 or self.device.type == "cpu":
            yield
            return
        while self.rank not in self._next_to_load(waits=True):
            pass
        yield
        self._has_loaded = True
        while self._next_to_load(waits=False):
            pass

    def _next_to_load(self, *, waits: bool) -> list[int]:
        """Returns the processes, of all machines, that load now; none when all have."""
        fit = room_for_more() if self._has_loaded else None
        states = self.gather_objects([(socket.gethostname(), waits, fit)])
        turn: list[int] = []
        for machine in {name for name, _, _ in states}:
            fits = [fit for name, _, fit in states if name == machine and fit is not None]
            queue = [r for r, (name, waits, _) in enumerate(states) if waits and name == machine]
            turn += queue[: max(1, int(min(fits, default=1)))]
        return turn

    def meet(self, where: str, timeout_s: float) -> None:
        """Waits for all processes, process 0 for `timeout_s`. ProcessLost says who is missing."""
        if self.count == 1:
            return
        # The others wait longer, so that none of them gives up before process 0 has told.
        patience = timeout_s + (0 if self.rank == 0 else _PATIENCE_S)
        try:
            distributed.monitored_barrier(
                self._gloo, timedelta(seconds=patience), wait_all_ranks=True
            )
        except RuntimeError as error:
            missing = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
            if missing is not None:
                reason = f"missing at {where}: process {missing[1].strip()}"
            elif self.rank == 0:
                reason = f"lost before {where}: {_first_reason(error)}"
            else:
                reason = f"process 0 has not come to {where}, or misses another one"
            raise self._lost(reason) from error

    @contextmanager
    def noticing_losses(self) -> Iterator[None]:
        """Turns the errors of the communication library into `ProcessLost`, with advice."""
        try:
            yield
        except RuntimeError as error:
            # gloo raises a plain RuntimeError, which only its text gives away.
            if not (isinstance(error, DistError) or "/gloo/" in str(error)):
                raise
            raise self._lost(_first_reason(error)) from error

    def _lost(self, reason: str) -> ProcessLost:
        return ProcessLost(
            f"process {self.rank} of {self.count} cannot reach another one, which has failed (its "
            "own message says why), was killed, or kept the others waiting for longer than "
            f"trainer.timeout_s. The same command goes on from the last checkpoint. ({reason})"
        )

    def close(self) -> None:
        """Leaves the process group at the end of a run that ended well; it waits for all."""
        self.accelerator.state.destroy_process_group()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the gradients over the processes, in place; who has none gets zeros.

        Some tensors of a LoRA have none, such as those of SD3's last block, which a
        DistributedDataParallel wrapper would refuse.
        """
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)  # in place; accelerate would copy it first
        chunks = flat.split([gradient.numel() for gradient in gradients])
        summed = [sums.view_as(gradient) for sums, gradient in zip(chunks, gradients, strict=True)]
        # One call for all tensors: hundreds of small copies would each start a kernel.
        torch._foreach_copy_(gradients, summed)


def _first_reason(error: RuntimeError) -> str:
    # "[file:line] reason. This is typically ...": only the reason is worth showing.
    first_line = str(error).splitlines()[0]
    return first_line.split("] ", 1)[-1].split(". This is typically", 1)[0]


def room_for_more() -> float:
    """Returns how many processes like this one the host's free memory takes, by its peak there."""
    return free_host_gib() / peak_memory_gib(torch.device("cpu"))


def gpu_memory_gib(device: torch.device) -> tuple[float, float]:
    """Returns what torch has reserved of a GPU at most so far, and what all programs hold now."""
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device) / 2**30, (total - free) / 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory so far in GiB: of the device for CUDA, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit

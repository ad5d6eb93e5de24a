"""Find the GPUs that processes may see, and in which precision this machine samples."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"
AUTO = "auto"
CPU_LISTING = Path("/proc/cpuinfo")
# Of CPUs that multiply in bf16: x86's vectors and tiles, and Arm's. Others emulate it.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process sees, in the words of CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(VARIABLE)
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def visible_device(device: torch.device) -> str:
    """Returns the trainer's GPU in the words of CUDA_VISIBLE_DEVICES."""
    return visible_gpus()[device.index or 0]


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Gives processes that are started inside the context other variables.

    This one has found its GPUs, and keeps them.
    """
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def sampling_dtype(device: torch.device) -> str:
    """Returns `bf16` for a GPU and a CPU with units for it, else `fp32`."""
    return "bf16" if device.type == "cuda" or BF16_FLAGS & cpu_flags() else "fp32"


def cpu_flags() -> set[str]:
    """Returns what the processor can do, in the words of Linux; nothing on other systems."""
    return set(CPU_LISTING.read_text().split()) if CPU_LISTING.exists() else set()

"""The GPUs that processes beside the trainer's may see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process sees, in the words of CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(VARIABLE)
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def visible_device(device: torch.device) -> str:
    """Returns the trainer's GPU in the words of CUDA_VISIBLE_DEVICES."""
    return visible_gpus()[device.index or 0]


@contextmanager
def showing(gpus: str | None) -> Iterator[None]:
    """Lets processes that are started inside the context see these GPUs alone; None for all."""
    before = os.environ.get(VARIABLE)
    if gpus is not None:
        os.environ[VARIABLE] = gpus  # this process has found its own, and keeps it
    try:
        yield
    finally:
        if gpus is not None:
            os.environ.pop(VARIABLE)
            os.environ.update({} if before is None else {VARIABLE: before})

"""Find the GPUs that processes may see, and what is faster on the devices of this machine."""

import os
import time
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch

from flowgrpo_rc.models.products import product

VARIABLE = "CUDA_VISIBLE_DEVICES"
AUTO = "auto"
# Rows, inputs and outputs of the products that are timed, about those of a small transformer.
SHAPE = (512, 1024, 1024)
ROUNDS = 7
# bf16, or oneDNN, has to save this share of a product's time: all else is no faster by it.
LEAST_SAVING = 0.2


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


@cache
def faster_dtype(device: torch.device) -> str:
    """Returns `bf16` or `fp32`, whichever samples faster on a device; times a CPU for a second."""
    if device.type == "cuda":
        return "bf16"
    # Some CPUs multiply faster in bf16 (AMX, AVX512_BF16), others slower.
    rows, inputs, outputs = SHAPE
    operands = {
        dtype: (torch.ones(rows, inputs, dtype=dtype), torch.ones(inputs, outputs, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in operands}
    for _ in range(ROUNDS):
        for dtype, (left, right) in operands.items():
            start = time.perf_counter()
            left @ right
            seconds[dtype].append(time.perf_counter() - start)
    # The least is the one that nothing disturbed.
    saving = 1 - min(seconds[torch.bfloat16]) / min(seconds[torch.float32])
    return "bf16" if saving >= LEAST_SAVING else "fp32"


def product_seconds() -> tuple[float, float]:
    """Times a fp32 product of the bundled model by torch's own library and by oneDNN."""
    operands = torch.ones(6144, 128), torch.ones(512, 128), None
    own, other = (
        min(timeit.repeat(partial(kernel, *operands), number=1, repeat=ROUNDS))
        for kernel in (torch.nn.functional.linear, product)
    )
    return own, other


@cache
def onednn_is_faster(device: torch.device) -> bool:
    """Returns whether oneDNN computes fp32 products faster than torch's own library does."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    own, other = product_seconds()
    return other < (1 - LEAST_SAVING) * own

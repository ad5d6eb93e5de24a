"""Chooses the precision of `rollout.dtype=auto`: the one that samples faster on this machine."""

from __future__ import annotations

import time
from functools import cache

import torch

AUTO = "auto"
# Rows, inputs and outputs of the products that are timed, about those of a small transformer.
SHAPE = (512, 1024, 1024)
ROUNDS = 7
# bf16 has to save this share of a product's time, since everything else in it is no faster.
LEAST_SAVING = 0.2


@cache
def faster_dtype(device: torch.device) -> str:
    """Returns `bf16` or `fp32`, whichever samples faster on a device.

    A GPU multiplies faster in bf16. Of CPUs some do (AMX, AVX512_BF16) and others take longer, so
    products in both are timed, by turns. It takes about a second, or less, once in a process.
    """
    if device.type == "cuda":
        return "bf16"
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

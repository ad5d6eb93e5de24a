"""Sets how the kernels of a GPU compute: with the same bits each time, or with fewer bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_numerics(*, deterministic: bool, tf32: bool) -> None:
    """Sets what a run asks for, before its first product on a GPU. It stays for the whole process.

    `deterministic` asks torch for kernels with the same bits each time; `tf32` lets fp32 products
    round their factors to 10 bits.
    """
    if deterministic:
        # torch reads it once, with the first product on a GPU; a card that was only looked at is
        # no harm. Where a product came before, torch up to 2.9 refuses the next one.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


@contextmanager
def convolving_in_tf32() -> Iterator[None]:
    """Lets cuDNN convolve fp32 in TF32 inside the context, whatever `tf32` says of products.

    Not where kernels have to give the same bits each time: rewards compute in other threads, and
    would find the flag on or off by chance.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before or not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def rounds_to_tf32(dtype: str) -> bool:
    """Returns whether a network of this precision now rounds factors to TF32; only fp32 does."""
    return dtype.partition("+")[0] == "fp32" and torch.backends.cuda.matmul.allow_tf32

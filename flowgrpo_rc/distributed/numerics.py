"""Sets how the kernels of a GPU compute: with the same bits each time, or with fewer bits."""

from __future__ import annotations

import os

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_numerics(*, deterministic: bool, tf32: bool) -> None:
    """Sets what a run asks for, before its first call of CUDA. It stays for the whole process.

    Args:
      deterministic: ask torch for kernels that give the same bits each time. The backward of
        attention adds in any order otherwise. torch raises where it has no such kernel.
      tf32: let products and convolutions of fp32 tensors round their factors to 10 bits of
        mantissa. False forbids it, whatever was set before: a rollout says whether it did.

    Raises:
      ValueError: cuBLAS has started without the workspace that makes it deterministic.
    """
    if deterministic:
        if torch.cuda.is_initialized() and _WORKSPACE not in os.environ:
            raise ValueError(
                "trainer.deterministic=true: CUDA was used before the run, without "
                f"{_WORKSPACE}=:4096:8 in the environment, which cuBLAS reads once. Set it before "
                "Python starts, or start the run first"
            )
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def rounds_to_tf32(dtype: str) -> bool:
    """Returns whether a network of this precision now rounds factors to TF32; only fp32 does."""
    return dtype.partition("+")[0] == "fp32" and torch.backends.cuda.matmul.allow_tf32

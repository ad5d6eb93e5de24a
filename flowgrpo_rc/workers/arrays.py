"""Tensors as numpy arrays, which Ray hands from process to process in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Array(NamedTuple):
    """A tensor as bytes [n], its shape, and the name of its dtype, which numpy need not know."""

    data: np.ndarray
    shape: tuple[int, ...]
    dtype: str


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Returns tensors of any device as arrays, by the same names."""
    return {name: _array(tensor) for name, tensor in tensors.items()}


def to_tensors(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors that `to_arrays` was given, with memory of their own.

    Shared memory is read-only, and a write to it would end the process.
    """
    return {
        name: torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype))
        .reshape(array.shape)
        .to(device)
        if array.data.size
        else torch.empty(array.shape, dtype=getattr(torch, array.dtype), device=device)
        for name, array in arrays.items()
    }


def num_bytes(arrays: Mapping[str, Array]) -> int:
    """Returns the size of arrays."""
    return sum(array.data.nbytes for array in arrays.values())


def _array(tensor: Tensor) -> Array:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Array(flat, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

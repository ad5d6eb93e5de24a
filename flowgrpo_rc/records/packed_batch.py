"""Batches as plain tensors with a header, which is what files hold of them."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import (
    Batch,
    Conditioning,
    DiffusionBatch,
    ImageSizes,
    SamplerSpec,
    TokenBatch,
    TokenSpec,
)

KINDS: dict[str, tuple[type[Batch], type[Any]]] = {
    "diffusion": (DiffusionBatch, SamplerSpec),
    "causal_lm": (TokenBatch, TokenSpec),
}
_SIZES = "image_sizes"
_ON_HOST = ("lengths", f"conditioning.{_SIZES}", f"negative.{_SIZES}")
_HOST = torch.device("cpu")


class PackedBatch(NamedTuple):
    """A batch as plain tensors."""

    header: Mapping[str, Any]  # its kind and its spec; JSON can hold them
    tensors: Mapping[str, Tensor]  # contiguous, by field; those of a conditioning as `field.name`


def pack(batch: Batch) -> PackedBatch:
    """Packs a batch. A tensor is copied only if it is not contiguous."""
    kind = next(name for name, (cls, _) in KINDS.items() if isinstance(batch, cls))
    header = {"kind": kind, "spec": dataclasses.asdict(batch.spec)}
    return PackedBatch(header, dict(_tensors(batch)))


def unpack(packed: PackedBatch, device: torch.device = _HOST) -> Batch:
    """Returns the batch that was packed, on a device; KeyError or TypeError for something else."""
    cls, spec_class = KINDS[packed.header["kind"]]
    tensors = {
        name: tensor if name in _ON_HOST else tensor.to(device)
        for name, tensor in packed.tensors.items()
    }
    return cls(spec=spec_class(**packed.header["spec"]), **_fields(tensors))


def _tensors(owner: Batch | Conditioning, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if field.name == _SIZES:
            value = _sizes_to_tensor(value)
        if isinstance(value, Conditioning):
            yield from _tensors(value, f"{field.name}.")
        elif isinstance(value, Tensor):
            yield prefix + field.name, value.detach().contiguous()


def _fields(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    conditionings: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        owner, _, field = name.rpartition(".")
        target = conditionings.setdefault(owner, {}) if owner else fields
        target[field] = value
    for owner, values in conditionings.items():
        sizes = _sizes_from_tensor(values.pop(_SIZES, None))
        fields[owner] = Conditioning(**values, image_sizes=sizes)
    return fields


def _sizes_to_tensor(sizes: tuple[ImageSizes, ...]) -> Tensor | None:
    """Returns rows and columns, int64 [P, images, 2], with zeros for missing images; or None."""
    if not sizes:
        return None
    most = max(map(len, sizes))
    return torch.tensor(
        [
            [*prompt_sizes, *itertools.repeat((0, 0), most - len(prompt_sizes))]
            for prompt_sizes in sizes
        ]
    )


def _sizes_from_tensor(tensor: Tensor | None) -> tuple[ImageSizes, ...]:
    listed = [] if tensor is None else tensor.tolist()
    return tuple(
        tuple((rows, columns) for rows, columns in prompt_sizes if rows) for prompt_sizes in listed
    )

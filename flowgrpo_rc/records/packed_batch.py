"""Batches as plain tensors with a header, which is what files hold of them."""

from __future__ import annotations

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


class PackedBatch(NamedTuple):
    """A batch as plain tensors.

    Attributes:
      header: its kind and its spec; JSON can hold them.
      tensors: its contiguous tensors by field; those of a conditioning as `field.name`.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def pack(batch: Batch) -> PackedBatch:
    """Packs a batch. A tensor is copied only if it is not contiguous."""
    kind = next(name for name, (cls, _) in KINDS.items() if isinstance(batch, cls))
    names = [field.name for field in dataclasses.fields(batch) if field.name != "spec"]
    tensors = dict(_flatten({name: getattr(batch, name) for name in names}))
    return PackedBatch({"kind": kind, "spec": dataclasses.asdict(batch.spec)}, tensors)


def unpack(packed: PackedBatch) -> Batch:
    """Returns the batch that was packed.

    Raises:
      KeyError, TypeError: the header or the tensors are those of something else.
    """
    cls, spec_class = KINDS[packed.header["kind"]]
    return cls(spec=spec_class(**packed.header["spec"]), **_unflatten(packed.tensors))


def _flatten(fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors by name; those of a conditioning as `name.field`."""
    for name, value in fields.items():
        if isinstance(value, Conditioning):
            own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            own[_SIZES] = _sizes_to_tensor(value.image_sizes)
            yield from _flatten({f"{name}.{field}": tensor for field, tensor in own.items()})
        elif value is not None:
            yield name, value.detach().contiguous()


def _unflatten(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in tensors.items() if "." not in name}
    for owner in {name.split(".")[0] for name in tensors if "." in name}:
        own = {
            name.removeprefix(f"{owner}."): value
            for name, value in tensors.items()
            if name.startswith(f"{owner}.")
        }
        sizes = _sizes_from_tensor(own.pop(_SIZES, None))
        fields[owner] = Conditioning(**own, image_sizes=sizes)
    return fields


def _sizes_to_tensor(sizes: tuple[ImageSizes, ...]) -> Tensor | None:
    """Returns rows and columns of each image of each prompt, int64, [P, images, 2]; zeros where a
    prompt has fewer images than another. None without images.
    """
    if not sizes:
        return None
    most = max(map(len, sizes))
    return torch.tensor([[*own, *itertools.repeat((0, 0), most - len(own))] for own in sizes])


def _sizes_from_tensor(tensor: Tensor | None) -> tuple[ImageSizes, ...]:
    listed = [] if tensor is None else tensor.tolist()
    return tuple(tuple((rows, columns) for rows, columns in own if rows) for own in listed)

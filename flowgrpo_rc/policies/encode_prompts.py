"""Conditioning of prompts: their texts, and their images where they bring some.

Legend: N prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, Prompt, SamplerSpec
from flowgrpo_rc.models.base import Edit, FlowModel

_CPU = torch.device("cpu")
_LIMIT = 2**30  # bytes


class KnownPrompts:
    """Encodes prompts that come again and again once, and keeps their conditioning on the host.

    With `model.offload_idle` the text encoders then stay where they are. Prompts are known in the
    batches in which they came first, so that no bit depends on what is kept: so many bytes, and
    what goes beyond is encoded each time.
    """

    def __init__(self, model: FlowModel, spec: SamplerSpec, *, limit: int = _LIMIT) -> None:
        self._model = model
        self._spec = spec
        self._left = limit
        self._known: dict[tuple[tuple[Edit, Edit], ...], list[Conditioning | None]] = {}

    def encode(self, prompts: Sequence[Prompt]) -> tuple[Conditioning, Conditioning | None]:
        """Returns what `encode_prompts` does, for N prompts."""
        columns = [_edits(prompts, negative=negative) for negative in (False, True)]
        # By whole batches: a prompt that is encoded beside others may differ in its last bit.
        key = tuple(zip(*columns, strict=True))
        if key not in self._known:
            encoded = encode_prompts(self._model, prompts, self._spec)
            kept = [
                None if rows is None else moved(_picked(rows, _firsts(edits)), _CPU)
                for rows, edits in zip(encoded, columns, strict=True)
            ]
            size = sum(_num_bytes(rows) for rows in kept if rows is not None)
            if size <= self._left:
                self._left -= size
                self._known[key] = kept
            return encoded
        conditioning, negative = (
            None if rows is None else _picked(moved(rows, self._model.device), _places(edits))
            for rows, edits in zip(self._known[key], columns, strict=True)
        )
        assert conditioning is not None
        return conditioning, negative


def encode_prompts(
    model: FlowModel, prompts: Sequence[Prompt], spec: SamplerSpec
) -> tuple[Conditioning, Conditioning | None]:
    """Encodes prompts and, under classifier-free guidance, their negatives.

    Args:
      model: the model whose text encoders are used.
      prompts: N prompts.
      spec: says whether there is guidance, how many text tokens there are at most, and how images
        are prepared.

    Returns:
      Conditioning of the prompts, N rows, and of their negatives, N rows; None for the latter
      without guidance.
    """
    with model.encoders_at_work():
        conditioning = encode_unique(model, prompts, spec)
        if model.cfg_scale(spec) <= 1:
            return conditioning, None
        return conditioning, encode_unique(model, prompts, spec, negative=True)


def encode_unique(
    model: FlowModel, prompts: Sequence[Prompt], spec: SamplerSpec, *, negative: bool = False
) -> Conditioning:
    """Encodes the texts of prompts with their images, each distinct pair once.

    Args:
      model: the model whose encoders are used.
      prompts: N prompts; equal ones are allowed.
      spec: says how many text tokens there are at most, and how images are prepared.
      negative: encode their negative texts, with the same images.

    Returns:
      Conditioning of every text, N rows in the order of `prompts`.
    """
    edits = _edits(prompts, negative=negative)
    unique = list(dict.fromkeys(edits))
    return _picked(model.encode_edits(unique, spec, negative=negative), _places(edits))


def _edits(prompts: Sequence[Prompt], *, negative: bool) -> list[Edit]:
    return [(p.negative_text if negative else p.text, p.images) for p in prompts]


def _places(edits: list[Edit]) -> list[int]:
    """Returns the place of each pair of text and images among the distinct ones."""
    place = {edit: row for row, edit in enumerate(dict.fromkeys(edits))}
    return [place[edit] for edit in edits]


def _firsts(edits: list[Edit]) -> list[int]:
    """Returns where each distinct pair comes first."""
    return [edits.index(edit) for edit in dict.fromkeys(edits)]


def _picked(conditioning: Conditioning, rows: list[int]) -> Conditioning:
    return conditioning.take(torch.tensor(rows, device=conditioning.embeds.device), rows)


def _tensors(conditioning: Conditioning) -> dict[str, Tensor]:
    values = {field.name: getattr(conditioning, field.name) for field in fields(conditioning)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def moved(conditioning: Conditioning, device: torch.device) -> Conditioning:
    """Returns a conditioning on a device."""
    there: dict[str, Any] = {n: t.to(device) for n, t in _tensors(conditioning).items()}
    return replace(conditioning, **there)


def _num_bytes(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in _tensors(conditioning).values())

"""Conditioning of prompts that is kept, so that each is encoded once and encoders may rest.

Legend: P distinct prompts.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.pictures import picture_digest
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.reading import blaming, parse_mapping

logger = logging.getLogger(__name__)

# The text of a prompt, and the images that it brings.
TextAndImages = tuple[str, tuple[str | bytes, ...]]
_HEADER = "prompt"  # a single entry: safetensors writes several in no fixed order


class PromptCache:
    """Keeps the conditioning of prompts in memory of the host, or in a folder for later runs.

    A prompt has the same bits in all batches of one size and length, whatever stands beside it, so
    it is kept once for each size, as it came first.

    Args:
      settings: what else the bits depend on, such as digests of the encoders' files, for JSON.
      folder: where files lie, in a folder for each `settings`; None for memory.
      by_batch: keep prompts for each batch, since lengths differ.
      limit: bytes of memory that are used; None for as many as there are.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        folder: Path | None,
        *,
        by_batch: bool = False,
        limit: int | None = None,
    ) -> None:
        self._folder = None if folder is None else folder / _digest(settings)[:16]
        self._by_batch = by_batch
        self._limit = limit
        self._known: dict[str, Conditioning] = {}

    def find(
        self, prompts: Sequence[TextAndImages], spec: SamplerSpec, negative: bool
    ) -> Conditioning | None:
        """Returns the conditioning of P prompts, on the host; None unless all are kept."""
        keys = self._keys(prompts, spec, negative)
        rows = [row for row in map(self._read, keys) if row is not None]
        return Conditioning.join(rows).counted() if len(rows) == len(keys) else None

    def keep(
        self,
        prompts: Sequence[TextAndImages],
        spec: SamplerSpec,
        negative: bool,
        encoded: Conditioning,
    ) -> None:
        """Keeps the conditioning of those of P prompts that are new."""
        keys = self._keys(prompts, spec, negative)
        rows = {key: _row(encoded, i) for i, key in enumerate(keys) if self._read(key) is None}
        if self._limit is not None:
            size = sum(x.nbytes for row in rows.values() for x in row.tensors().values())
            if size > self._limit:
                return
            self._limit -= size
        if self._folder is None:
            self._known |= rows
            return
        for key, row in rows.items():
            header = json.dumps({"key": key, "image_sizes": row.image_sizes})
            # Other processes may write the same file at this moment: each has a name of its own.
            file = self._folder / f"{key}.{secrets.token_hex(4)}"
            write_atomic(file, save(row.tensors(), metadata={_HEADER: header}))
            file.replace(self._folder / f"{key}.safetensors")

    def _keys(
        self, prompts: Sequence[TextAndImages], spec: SamplerSpec, negative: bool
    ) -> list[str]:
        keys = []
        for text, images in prompts:
            limits = [spec.max_sequence_length, spec.condition_images, spec.condition_pixels]
            keys.append(_digest([text, negative, *limits, *map(picture_digest, images)]))
        beside = keys if self._by_batch else len(keys)
        return [_digest([key, beside]) for key in keys]

    def _read(self, key: str) -> Conditioning | None:
        if self._folder is None:
            return self._known.get(key)
        path = self._folder / f"{key}.safetensors"
        if not path.exists():
            return None
        try:
            with blaming(path), safe_open(path, framework="pt") as file:
                header = parse_mapping((file.metadata() or {})[_HEADER])
                refuse((header["key"] != key, "it is of another prompt"))
                sizes = tuple(tuple((h, w) for h, w in row) for row in header["image_sizes"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return Conditioning(**tensors, image_sizes=sizes)
        except ValueError as error:
            logger.warning("model.prompt_cache: %s. The prompt is encoded anew", error)
            return None


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _row(encoded: Conditioning, place: int) -> Conditioning:
    """Returns one prompt on the host, without the padding that the batch gave it."""
    rows = torch.tensor([place], device=encoded.embeds.device)
    row = encoded.take(rows, [place]).to(torch.device("cpu"))
    if row.mask is None:
        return row
    # Padding that is not zero stays: the encoder itself pads to a fixed length.
    used = row.mask[0] | (row.embeds[0] != 0).any(1)
    # An empty prompt may have no token at all; then nothing tells its padding from the batch's.
    length = 1 + max(used.nonzero().flatten().tolist(), default=len(used) - 1)
    return replace(row, embeds=row.embeds[:, :length], mask=row.mask[:, :length])

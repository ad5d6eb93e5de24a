"""A process that samples: it owns an engine, and takes one chunk of a request at a time.

Tensors travel as safetensors, so nothing depends on what a process on the other side has.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import load, save
from torch import Tensor

from flowgrpo_rc.distributed.processes import room_for_more
from flowgrpo_rc.libraries import set_allocator
from flowgrpo_rc.records.packed_batch import pack
from flowgrpo_rc.rollout.engine import (
    EngineError,
    RolloutEngine,
    RolloutRequest,
    Samples,
    check_settings,
)

# Ray gives its references and handles no type.
Reference = Any  # to an object in its store
Handle = Any  # of an actor
# What has to be of one version where a chunk is sampled and where it is trained on.
_PACKAGES = ("flowgrpo-rc", "torch", "diffusers", "transformers", "peft")
_OF_PROMPTS = ("conditioning.", "negative.")
LATENTS = "latents"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledChunk:
    """A chunk as a worker sends it: a packed batch with LATENTS, and what rewards see of it."""

    header: Mapping[str, object]
    tensors: bytes
    samples: Samples | None
    blocks: tuple[int, int] = (0, 0)  # as in `RolloutChunk`


def package_versions() -> dict[str, str]:
    """Returns the versions that must be those of the trainer."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns tensors of any device as safetensors; no two may share memory."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


class Worker:
    """Samples with an engine of its own."""

    def __init__(self, num_threads: int) -> None:
        """Takes the place that the cluster gives it, with so many threads of torch."""
        torch.set_num_threads(num_threads)
        set_allocator()  # a node that joined a cluster has not the trainer's environment
        self._engine: RolloutEngine[Any]
        self._version: int | None = None

    def machine(self) -> str:
        """Returns the name of its machine; it is answered when there is room for the worker."""
        return str(ray.get_runtime_context().get_node_id())

    def load(self, make_engine: Callable[[], RolloutEngine[Any]]) -> tuple[dict[str, str], float]:
        """Makes the engine; returns versions of packages here, and how many workers fit besides."""
        self._engine = make_engine()
        return package_versions(), room_for_more()

    def sample(
        self, request: RolloutRequest, rows: range, version: int, adapter: Sequence[Any]
    ) -> tuple[int, SampledChunk]:
        """Samples the rows of a chunk with a version of the LoRA; returns their bytes and them.

        `adapter` holds a reference to that LoRA, which is fetched if the version is another one.
        """
        if version != self._version:
            self._engine.sync_weights(load(ray.get(adapter[0])), version)
            self._version = version
        chunks = list(self._engine.generate(replace(request, only=rows)))
        if [len(chunk.prompts) for chunk in chunks] != [len(rows)]:
            raise EngineError(
                f"the rollout engine was asked for one chunk of {len(rows)} samples and gave "
                f"{len(chunks)}: its generate has to heed request.rows()"
            )
        (chunk,) = chunks
        check_settings(request.spec, chunk.batch.spec)
        self._engine.check_quantization(request.spec)
        self._engine.check_weights()
        packed = pack(chunk.batch)
        tensors = {
            name: tensor
            for name, tensor in packed.tensors.items()
            if rows.start == 0 or not name.startswith(_OF_PROMPTS)
        }
        if chunk.latents is not None:
            # A batch without a window holds the same memory.
            tensors[LATENTS] = chunk.latents.clone()
        content = to_bytes(tensors)
        sampled = SampledChunk(
            header=packed.header, tensors=content, samples=chunk.samples, blocks=chunk.blocks
        )
        size = len(content)
        if isinstance(chunk.samples, np.ndarray):
            size += chunk.samples.nbytes
        return size, sampled

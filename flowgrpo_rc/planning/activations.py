"""Measures the memory of a planned run's activations with fake tensors.

A fake tensor has a shape, a dtype and a device, and no numbers, so that a forward of any size takes
seconds and no memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.spec.run_spec import RunSpec

# Makes what encloses a checkpointed forward, and what encloses its repetition.
Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


class PeakMemory(TorchDispatchMode):
    """Follows the memory of the tensors that are made inside the context.

    Attributes:
      bytes: what is alive.
      peak: the most that was alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "prim":  # questions about a tensor, more than half of all calls
            return func(*args, **(kwargs or {}))
        # What came from outside; a view may be made of it.
        self._seen.update(_storages((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage not in self._seen:
                self._seen.add(storage)
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return made

    def _freed(self, size: int) -> None:
        self.bytes -= size


def _storages(tree: object) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _NormalizeInFp32(TorchFunctionMode):
    """Normalizes in fp32 under autocast, as CUDA does; on the CPU torch does it in bf16."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (F.layer_norm, F.rms_norm, F.group_norm):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_card(config: Config) -> Iterator[None]:
    """Enters bf16 autocast, as it works on a card, if `trainer.mixed_precision` asks for it."""
    if config.trainer.mixed_precision != "bf16":
        yield
    else:
        with torch.autocast("cpu", torch.bfloat16), _NormalizeInFp32():
            yield


def rows_at_once(run: RunSpec) -> int:
    """Returns the rows of a forward of the update: samples times SDE steps, without guidance."""
    actor = run.settings.actor
    return actor.ppo_micro_batch_size_per_gpu * (actor.steps_per_forward or run.trained_steps)


def samples_at_once(run: RunSpec) -> Mapping[str, int]:
    """Returns how many samples are at work at once in each phase; `shown` decodes held-out ones."""
    config = run.settings
    chunk, held_out = run.chunk_size, config.rollout.val_kwargs.batch_size
    most = config.model.decode_batch_size
    return {
        "update": config.actor.ppo_micro_batch_size_per_gpu,
        "rollout": chunk,
        "decoding": min(most or chunk, chunk),
        "evaluation": held_out,
        "shown": min(most or held_out, held_out),
    }


def phase_bytes(phase: str, run: RunSpec, model: FlowModel, samples: int) -> int:
    """Measures the activations of one phase of `samples_at_once`, in bytes.

    Of several transformers the first is measured: each row goes through one of them.
    """
    config = run.settings
    is_held_out = phase in ("evaluation", "shown")  # made by the trainer's network
    spec = config.rollout.held_out_spec() if is_held_out else config.rollout.spec()

    def decode(vae: nn.Module) -> int:
        decoder = copy.copy(model)
        decoder.pipeline = copy.copy(model.pipeline)
        decoder.pipeline.vae = vae
        latents = torch.empty(samples, *model.latent_shape(spec))
        with torch.no_grad(), PeakMemory() as memory:
            decoder._decode(latents, spec)
        return memory.peak

    def forward(network: nn.Module) -> int:
        inputs = blank_inputs(model, samples, spec)
        mixed = as_on_a_card(config) if is_held_out else nullcontext()
        with mixed, torch.no_grad(), PeakMemory() as memory:
            model.velocity(network, *inputs, spec)
        return memory.peak

    def update(network: nn.Module) -> int:
        # A backward computes a block again outside of the mode that normalizes in fp32.
        to_train(network, config, lambda: (nullcontext(), as_on_a_card(config)))
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        rows = samples * rows_at_once(run) // config.actor.ppo_micro_batch_size_per_gpu
        inputs = blank_inputs(model, rows, spec)
        with PeakMemory() as memory, as_on_a_card(config):
            velocity = model.velocity(network, *inputs, spec)
            velocity.square().mean().backward()
        return memory.peak

    if phase in ("decoding", "shown"):
        return on_fakes(copy.deepcopy(model.pipeline.vae), decode)
    if phase == "update":
        return measured(model.transformer, update)
    dtype = None if is_held_out else DTYPES[config.rollout.dtype]
    return measured(model.transformer, forward, dtype)


def to_train(network: Any, config: Config, context_fn: Contexts = noop_context_fn) -> None:
    """Sets a network up for an update; `context_fn` is that of torch's checkpoint."""

    def recompute(block: nn.Module, *inputs: object) -> object:
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=context_fn)

    if config.model.gradient_checkpointing:
        network.enable_gradient_checkpointing(recompute)
    network.train()  # checkpointing asks for it; there is no dropout


def blank_inputs(
    model: FlowModel, rows: int, spec: SamplerSpec, negative_spec: SamplerSpec | None = None
) -> tuple[Tensor, Tensor, Conditioning, Conditioning | None]:
    """Returns latents, timesteps, conditioning and negative of `rows` samples.

    `negative_spec` is that of the negative prompts; None for the same.
    """
    conditioning = model.blank_conditioning(rows, spec)
    negative = None
    if model.cfg_scale(spec) > 1:
        negative = model.blank_conditioning(rows, negative_spec or spec)
    return torch.empty(rows, *model.latent_shape(spec)), torch.empty(rows), conditioning, negative


def measured(
    network: Any, measure: Callable[[nn.Module], int], dtype: torch.dtype | None = None
) -> int:
    """Returns the number that a function finds on copies of a network whose tensors are fakes.

    What a transformer needs grows evenly with its blocks. Where they are many, copies with 1, 2 and
    3 of each kind are measured in its place. `dtype` is that of their floating-point tensors, None
    for their own.
    """
    runs = _runs(network)

    def shortened(longer: int | None = None, more: int = 0) -> int:
        """Measures a copy with one block of each kind, and some more of one kind."""
        left_out = [
            (name, slice(start + 1 + more * (place == longer), stop))
            for place, (name, start, stop) in enumerate(runs)
        ]
        # deepcopy takes what it finds in its memo: what is left out need not be copied.
        memo: dict[int, Any] = {}
        for name, blocks in left_out:
            memo |= {id(block): nn.Identity() for block in network.get_submodule(name)[blocks]}
        copied = copy.deepcopy(network, memo=memo)
        for name, blocks in reversed(left_out):
            del copied.get_submodule(name)[blocks]
        return on_fakes(copied, measure, dtype)

    # Nothing is saved if the short copies have as many blocks together as the network.
    if (4 + 2 * len(runs)) * len(runs) < sum(stop - start for _, start, stop in runs):
        least = whole = shortened()
        for place, (_, start, stop) in enumerate(runs):
            block = shortened(place, 1) - least
            if shortened(place, 2) - least != 2 * block:
                break
            whole += (stop - start - 1) * block
        else:
            return whole
    return on_fakes(copy.deepcopy(network), measure, dtype)


def _runs(network: nn.Module) -> list[tuple[str, int, int]]:
    """Returns where more than 3 blocks of a kind follow each other: name of a list, first, end."""

    def kind(block: nn.Module) -> list[tuple[str, torch.Size, bool]]:
        return [(name, p.shape, p.requires_grad) for name, p in block.named_parameters()]

    runs = []
    for name, blocks in network.named_children():
        start = 0
        for _, group in groupby(blocks if isinstance(blocks, nn.ModuleList) else (), kind):
            stop = start + len(list(group))
            if stop - start > 3:
                runs.append((name, start, stop))
            start = stop
    return runs


def on_fakes(
    network: nn.Module, measure: Callable[[nn.Module], int], dtype: torch.dtype | None = None
) -> int:
    """Returns what a function finds on a network, whose tensors become fakes on the CPU.

    On the CPU torch has the kernels of attention that do not hold all its products, as on a GPU;
    tensors on the meta device would take those that do.
    """

    def fake(tensor: Tensor) -> Tensor:
        cast = dtype is not None and tensor.is_floating_point()
        return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device="cpu")

    with FakeTensorMode(allow_non_fake_inputs=True):
        network._apply(fake)
        for module in network.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):  # neither a parameter nor a buffer
                    setattr(module, name, fake(value))
        return measure(network)

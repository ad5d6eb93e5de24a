"""Measures the memory of a planned run's activations with fake tensors.

A fake tensor has a shape, a dtype and a device, and no numbers, so that a forward of any size takes
seconds and no memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowgrpo_rc.batch import Conditioning
from flowgrpo_rc.config.check_engine import chunk_size
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import DTYPES, FlowModel


class Activations(NamedTuple):
    """Bytes that each phase needs beside weights and states. The phases do not coincide.

    Attributes:
      update: forward and backward of a micro-batch.
      rollout: a forward of a chunk.
      decoding: the VAE's, of as many samples as are decoded at once.
    """

    update: int
    rollout: int
    decoding: int


class PeakMemory(TorchDispatchMode):
    """Follows the memory of the tensors that are made inside the context.

    Attributes:
      bytes: what is alive.
      peak: the most that was alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._seen.add(storage)  # what came from outside; a view may be made of it
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


_Inputs = tuple[Tensor, Tensor, Conditioning, Conditioning | None]


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def rows_at_once(config: Config) -> int:
    """Returns the rows of a forward of the update: samples times SDE steps, without guidance."""
    actor = config.actor
    together = actor.steps_per_forward or config.rollout.window()[0]
    return actor.ppo_micro_batch_size_per_gpu * together


def activations(config: Config, model: FlowModel) -> Activations:
    """Measures the activations of a run, with its settings, on fake tensors.

    Args:
      config: the settings of a flow model.
      model: on the meta device, with its LoRA.
    """
    chunk = chunk_size(config)
    return Activations(
        update=update_bytes(config, model, rows_at_once(config)),
        rollout=rollout_bytes(config, model, chunk),
        decoding=decoding_bytes(config, model, min(config.model.decode_batch_size or chunk, chunk)),
    )


def update_bytes(config: Config, model: FlowModel, rows: int) -> int:
    """Measures forward and backward of a micro-batch.

    Args:
      config: the settings.
      model: on the meta device, with its LoRA.
      rows: samples times SDE steps that are evaluated at once.
    """
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=config.trainer.mixed_precision == "bf16")

    def train(network: Any) -> int:
        if config.model.gradient_checkpointing:
            network.enable_gradient_checkpointing()
        network.train()  # checkpointing asks for it; there is no dropout
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        inputs = _inputs(config, model, rows)
        with PeakMemory() as memory:
            with mixed:
                velocity = model.velocity(network, *inputs, config.rollout.spec())
            velocity.square().mean().backward()
        return memory.peak

    return _on_fakes(model.network, train)


def rollout_bytes(config: Config, model: FlowModel, rows: int) -> int:
    """Measures a forward of the rollout.

    Args:
      config: the settings.
      model: on the meta device, with its LoRA.
      rows: samples of a chunk.
    """

    def sample(network: Any) -> int:
        inputs = _inputs(config, model, rows)
        with torch.no_grad(), PeakMemory() as memory:
            model.velocity(network, *inputs, config.rollout.spec())
        return memory.peak

    return _on_fakes(model.network, sample, DTYPES[config.rollout.dtype])


def decoding_bytes(config: Config, model: FlowModel, rows: int) -> int:
    """Measures the decoding of final latents.

    Args:
      config: the settings.
      model: on the meta device.
      rows: samples that are decoded at once.
    """
    whole = model.pipeline.vae

    def decode(vae: Any) -> int:
        model.pipeline.vae = vae
        latents = torch.empty(rows, *model.latent_shape(config.rollout.spec()))
        with torch.no_grad(), PeakMemory() as memory:
            model._decode(latents, config.rollout.spec())
        return memory.peak

    try:
        return _on_fakes(whole, decode)
    finally:
        model.pipeline.vae = whole


def _inputs(config: Config, model: FlowModel, rows: int) -> _Inputs:
    """Returns latents, timesteps, conditioning and negative of `rows` samples."""
    spec = config.rollout.spec()
    conditioning = model.blank_conditioning(rows, spec)
    negative = model.blank_conditioning(rows, spec) if model.cfg_scale(spec) > 1 else None
    latents = torch.empty(rows, *model.latent_shape(spec))
    return latents, torch.empty(rows), conditioning, negative


def _on_fakes(
    network: nn.Module, measure: Callable[[Any], int], dtype: torch.dtype | None = None
) -> int:
    """Returns what a function finds on a copy of a network whose tensors are fakes on the CPU.

    On the CPU torch has the kernels of attention that do not hold all its products, as on a GPU;
    tensors on the meta device would take those that do.

    Args:
      network: on the meta device; it is not changed.
      measure: called with the copy.
      dtype: of the copy's floating-point tensors; None for their own.
    """

    def fake(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=wanted, device="cpu")

    faked = copy.deepcopy(network)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in faked.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    new = nn.Parameter(fake(parameter), parameter.requires_grad)
                    module._parameters[name] = new
            for name, tensor in [*module._buffers.items(), *vars(module).items()]:
                if isinstance(tensor, Tensor):
                    setattr(module, name, fake(tensor))
        return measure(faked)

"""Rollouts that are cheaper or worse than the last, for the ladder.

An engine of this file samples with a worse copy of the trainer's network, and records what it did
without fault. Its copy has to be in another precision than the trainer's, since copies of the same
precision share their frozen weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.quantization import quantized_layers, repeated_blocks
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

GROUP = 32  # weights of a row that share a scale, as in rollout.quantization=int4


class FewBits(DiffusersEngine):
    """Rounds the frozen weights of the blocks to `bits` bits, 32 weights of a row at a time.

    Args:
      model: the trainer's model.
      network: its transformer with the LoRA.
      bits: of a weight.
      **options: as in `DiffusersEngine`.
    """

    def __init__(self, model: Any, network: nn.Module, *, bits: int, **options: Any) -> None:
        super().__init__(model, network, **options)
        for layer in quantized_layers(self.transformer):
            layer.weight.copy_(rounded(layer.weight, bits))


class SkippedBlock(DiffusersEngine):
    """Leaves one block of the transformer out: a smaller network than the trainer's.

    Args:
      model: the trainer's model.
      network: its transformer with the LoRA.
      block: number of the block, from 0.
      **options: as in `DiffusersEngine`.
    """

    def __init__(self, model: Any, network: nn.Module, *, block: int, **options: Any) -> None:
        super().__init__(model, network, **options)
        skipped = list(repeated_blocks(self.transformer))[block]
        skipped.forward = unchanged


class ReusedVelocity(DiffusersEngine):
    """Computes the velocity at every second step of a rollout, and uses it twice."""

    def __init__(self, model: Any, network: nn.Module, **options: Any) -> None:
        super().__init__(model, network, **options)
        computed = self._policy._velocity
        last: list[Tensor] = []

        def reused(
            latents: Tensor,
            timesteps: Tensor,
            conditioning: Conditioning,
            negative: Conditioning | None,
            spec: SamplerSpec,
            group: Tensor | None = None,
        ) -> Tensor:
            steps = model.walked_schedule(spec).timesteps
            index = int((steps == timesteps[0]).nonzero()[0])
            if index % 2 == 0:
                last[:] = [computed(latents, timesteps, conditioning, negative, spec, group)]
            return last[0]

        self._policy._velocity = reused


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Rounds a weight to the nearest of 2^bits levels between the extremes of its group.

    Args:
      weight: [rows, columns]; columns is a multiple of `GROUP`.
      bits: of a weight.

    Returns:
      The rounded weight, in the same dtype.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    levels = torch.round((groups - low) / scale)
    return (low + levels * scale).flatten(1).to(weight.dtype)


def unchanged(
    hidden_states: Tensor, encoder_hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a block of Stable Diffusion 3 in the order of its outputs."""
    return encoder_hidden_states, hidden_states

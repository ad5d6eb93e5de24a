"""A flow so small that the gradient of its policy is known: a residual MLP with a LoRA, in float64.

Legend: B samples, T steps of the SDE window, D elements of a sample, P trained numbers, N steps of
several samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from flowgrpo_rc.batch import DiffusionBatch

# The network.
CLASSES = 8
WIDTH = 64
BLOCKS = 2
FEATURES = 16
GUIDANCE = 3.0
CHUNK = 512  # steps whose gradients are held at once

Lora = Mapping[str, Tensor]


class Block(nn.Module):
    """A residual block. The LoRA is on its two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        """Computes the block on hidden states, [B, WIDTH]."""
        return h + self.down(nn.functional.silu(self.up(self.norm(h))))


class Network(nn.Module):
    """The network that predicts the velocity.

    Args:
      elements: number of elements of a sample, D.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(elements, WIDTH)
        self.outlet = nn.Linear(WIDTH, elements)
        self.label = nn.Embedding(CLASSES + 1, WIDTH)
        self.time = nn.Linear(FEATURES, WIDTH)
        self.skip = nn.Linear(FEATURES, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        """Predicts the velocity.

        Args:
          x: the state, [B, D].
          timesteps: sigma x 1000, [B].
          classes: int64, [B]; `CLASSES` stands for no class.

        Returns:
          The velocity, [B, D].
        """
        frequencies = torch.arange(1, FEATURES // 2 + 1, device=x.device)
        angles = (timesteps / 1000).unsqueeze(1) * math.pi * frequencies / 2
        time = torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)
        h = self.inlet(x) + self.time(time) + self.label(classes)
        for block in self.blocks:
            h = block(h)
        return self.outlet(h) + self.skip(time) * x


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A network as it samples, in the precision of its weights. Latents stay float64.

    Attributes:
      network: the network.
      guidance: scale of classifier-free guidance.
      rounds: round the output of the network to bf16, which is an error without any system.
    """

    network: nn.Module
    guidance: float = GUIDANCE
    rounds: bool = False

    def velocity(self, x: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        """Predicts the guided velocity, [B, D], with the arguments of `Network.forward`."""
        dtype = next(self.network.parameters()).dtype
        nobody = torch.full_like(classes, CLASSES)
        both = self.network(
            torch.cat([x, x]).to(dtype), timesteps.repeat(2), torch.cat([classes, nobody])
        )
        if self.rounds:
            both = both.bfloat16()
        conditional, unconditional = both.to(x.dtype).chunk(2)
        return unconditional + self.guidance * (conditional - unconditional)

    def lora(self) -> dict[str, Tensor]:
        """Returns a copy of the LoRA's tensors by name."""
        return {
            name: p.detach().clone()
            for name, p in self.network.named_parameters()
            if "lora_" in name
        }


def weighted_gradients(
    sampler: Sampler, batch: DiffusionBatch, slopes: Tensor, coefficients: Tensor
) -> Tensor:
    """Computes gradients by the LoRA of weighted sums of K quantities over steps.

        gradient_e = sum_kbt coefficients_kebt d(quantity_kbt) / d(LoRA)

    The gradients of each step are taken once, in float32, and serve all E sums.

    Args:
      sampler: the network and its guidance; its weights are plain numbers.
      batch: the recorded steps.
      slopes: derivative of each quantity by the velocity, [K, B, T, D].
      coefficients: [K, E, B, T].

    Returns:
      [E, P], float64.
    """
    network = copy.deepcopy(sampler.network).float()
    lora = Sampler(network=network).lora()
    used = coefficients.flatten(1).any(1)
    weights = coefficients[used].flatten(2).float()
    cotangents = slopes[used].flatten(1, 2).transpose(0, 1).float()
    x = batch.all_latents[:, :-1].flatten(0, 1).float()
    times = batch.all_timesteps.flatten().float()
    classes = step_classes(batch)

    def pulled(x: Tensor, time: Tensor, label: Tensor, cotangents: Tensor) -> Lora:
        """Gradients, [K, ...] each, of <velocity, cotangent> at one step."""
        labels = torch.stack([label, torch.full_like(label, CLASSES)])

        def velocity(lora: Lora) -> Tensor:
            given = (x.expand(2, -1), time.expand(2), labels)
            conditional, unconditional = functional_call(network, dict(lora), given)
            return unconditional + sampler.guidance * (conditional - unconditional)

        found: Lora = vmap(lambda one: vjp(velocity, lora)[1](one)[0])(cotangents)
        return found

    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(x)).split(CHUNK):
        by_name = vmap(pulled)(x[rows], times[rows], classes[rows], cotangents[rows])
        found = torch.cat([gradient.flatten(2) for gradient in by_name.values()], 2)
        total = total + torch.einsum("ken,nkp->ep", weights[:, :, rows], found).double()
    return total


def step_classes(batch: DiffusionBatch) -> Tensor:
    """Returns the class of every recorded step, [B * T]."""
    classes = batch.conditioning.embeds[batch.prompt_index].flatten()
    return classes.repeat_interleave(batch.num_steps)

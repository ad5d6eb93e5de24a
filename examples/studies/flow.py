"""A flow so small that the gradient of its policy is known: a residual MLP with a LoRA, in float64.

Each of `CLASSES` prompts has two modes, and the reward prefers one of them, smoothly. The data is
drawn, the model trained and the policy moved from fixed seeds, in seconds; nothing is stored.

Legend: B samples, T steps of the SDE window, S denoising steps, D elements of a sample, P trained
numbers, E sets of coefficients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.core.kl import gaussian_kl
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.core.transition import GaussianSteps, log_prob
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.policies.flow import sample_trajectory
from flowgrpo_rc.policies.scheduler import step_transition
from flowgrpo_rc.rollout.quantization import quantize

# The network.
CLASSES = 8
WIDTH = 64
BLOCKS = 2
FEATURES = 16
RANK = 2
# The sampling.
STEPS = 6
NOISE_LEVEL = 0.7
GUIDANCE = 3.0
PROMPTS = 64  # of a batch
SAMPLES = 16  # of a prompt
CHUNK = 1024  # steps whose gradients are held at once

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


class Evaluation(NamedTuple):
    """The training graph on the recorded steps of a batch.

    Attributes:
      log_probs: [B, T].
      gaussian: the Gaussians of the steps, with their KL from those of the rollout, [B, T].
      means: their means, [B, T, D].
      log_prob_slope: derivative of the log-prob by the velocity, [B, T, D].
      kl_slope: derivative of the KL by the velocity, [B, T, D].
    """

    log_probs: Tensor
    gaussian: GaussianSteps
    means: Tensor
    log_prob_slope: Tensor
    kl_slope: Tensor


class Problem:
    """The data, the reward and the trained network of one size.

    Args:
      elements: number of elements of a sample, D.
      seed: seed of the data, the network and the batches.
    """

    def __init__(self, elements: int, seed: int = 0) -> None:
        self.elements = elements
        self.seed = seed
        source = generator(seed, elements, "data")
        self.centres, self.directions = (
            0.5 * torch.randn(2, CLASSES, elements, generator=source)
        ).double()
        sigmas = torch.cat([torch.linspace(1, 1 / STEPS, STEPS), torch.zeros(1)]).double()
        self.schedule = Schedule(sigmas, sigmas[:-1] * 1000)
        self.spec = SamplerSpec(
            dtype="fp64",
            height=1,
            width=elements,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            noise_level=NOISE_LEVEL,
            sde_type="sde",
            log_prob_convention="gaussian",
            max_sequence_length=1,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = inject_adapter_in_model(
                LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["up", "down"]),
                Network(elements),
            )

    def data(self, classes: Tensor, source: torch.Generator) -> Tensor:
        """Draws samples of the data, [B, D], of given classes [B]."""
        sign = (torch.randint(2, (len(classes), 1), generator=source) * 2 - 1).double()
        noise = torch.randn(len(classes), self.elements, generator=source).double()
        return self.centres[classes] + sign * self.directions[classes] + 0.2 * noise

    def reward(self, final: Tensor, classes: Tensor) -> Tensor:
        """Computes the reward of final latents [B, D], [B] in 0..1.

        It rises smoothly from one mode of the class to the other.
        """
        direction = self.directions[classes]
        position = ((final - self.centres[classes]) * direction).sum(1) / (direction**2).sum(1)
        return torch.sigmoid(4 * position)

    def fit(self, updates: int, size: int = 256) -> None:
        """Trains the base weights by flow matching, and makes the network float64.

        One class in five is hidden, for classifier-free guidance.

        Args:
          updates: number of updates.
          size: samples of one update.
        """
        base = [p for name, p in self.network.named_parameters() if "lora_" not in name]
        for parameter in self.network.parameters():
            parameter.requires_grad_(any(parameter is p for p in base))
        optimizer = torch.optim.AdamW(base, lr=2e-3, weight_decay=0)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        source = generator(self.seed, self.elements, "fit")
        for _ in range(updates):
            classes = torch.randint(CLASSES, (size,), generator=source)
            clean = self.data(classes, source).float()
            noise = torch.randn(size, self.elements, generator=source)
            sigma = torch.rand(size, 1, generator=source)
            hidden = torch.rand(size, generator=source) < 0.2
            seen = torch.where(hidden, CLASSES, classes)
            velocity = self.network((1 - sigma) * clean + sigma * noise, 1000 * sigma[:, 0], seen)
            loss = ((velocity - (noise - clean)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
        self.network.double().requires_grad_(False)

    def lora(self) -> dict[str, Tensor]:
        """Returns a copy of the LoRA's tensors by name."""
        return {
            name: p.detach().clone()
            for name, p in self.network.named_parameters()
            if "lora_" in name
        }

    def load(self, lora: Lora) -> None:
        """Puts the tensors of a LoRA into the network."""
        self.network.load_state_dict(lora, strict=False)

    def replica(
        self, *, dtype: torch.dtype = torch.float64, quantization: str | None = None
    ) -> nn.Module:
        """Returns a copy of the network in another precision, made as the package's engines do."""
        copied = copy.deepcopy(self.network).to(dtype)
        if quantization is not None:
            quantize(copied, quantization)
        return copied

    def rollout(self, sampler: Sampler, index: int, purpose: str) -> tuple[DiffusionBatch, Tensor]:
        """Samples a batch and scores it.

        Args:
          sampler: samples in place of the policy.
          index: number of the batch.
          purpose: use of the batch. Prompts and noise depend on index and purpose alone.

        Returns:
          The batch, and its rewards [B].
        """
        source = generator(self.seed, self.elements, index, purpose)
        prompts = torch.randint(CLASSES, (PROMPTS,), generator=source)
        group = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        classes = prompts[group]
        size = len(group)
        noise = torch.randn(STEPS, size, self.elements, generator=source).double()
        window = torch.arange(STEPS - 1).expand(size, -1)
        found = sample_trajectory(
            lambda x, timesteps: sampler.velocity(x, timesteps, classes),
            self.schedule,
            noise[-1],
            self.spec,
            window,
            lambda step: noise[step],
            keep_means=True,
        )
        batch = DiffusionBatch(
            spec=self.spec,
            group=group,
            seed=torch.arange(size),
            policy_version=torch.zeros(size, dtype=torch.int64),
            rollout_log_probs=found.log_probs,
            all_latents=found.window_latents,
            all_timesteps=self.schedule.timesteps[window],
            step_indices=window,
            sigmas=self.schedule.sigmas,
            conditioning=Conditioning(embeds=prompts.reshape(-1, 1, 1)),
            prompt_index=group,
            prev_sample_mean=found.means,
        )
        return batch, self.reward(found.final, classes)

    def evaluate(self, batch: DiffusionBatch) -> Evaluation:
        """Evaluates the network as it is on every recorded step of a batch."""
        assert batch.prev_sample_mean is not None
        x = batch.all_latents[:, :-1]
        x_next = batch.all_latents[:, 1:]
        means = batch.prev_sample_mean
        shape = x.shape[:2]
        steps = batch.step_indices.flatten()
        v = Sampler(network=self.network).velocity(
            x.flatten(0, 1), batch.all_timesteps.flatten(), step_classes(batch)
        )
        v.requires_grad_()
        step = step_transition(
            x.flatten(0, 1), v, batch.sigmas, steps, sde_type="sde", noise_level=NOISE_LEVEL
        )
        value = log_prob(step, x_next.flatten(0, 1))
        kl = gaussian_kl(step.mean, means.flatten(0, 1), step.std)
        slopes = [
            torch.autograd.grad(one.sum(), v, retain_graph=True)[0].unflatten(0, shape)
            for one in (value, kl)
        ]
        dt = (batch.sigmas[steps + 1] - batch.sigmas[steps]).view(shape)
        gaussian = GaussianSteps(step.std.view(shape), dt, kl.detach().view(shape))
        return Evaluation(
            value.detach().view(shape), gaussian, step.mean.detach().unflatten(0, shape), *slopes
        )

    def pull_back(self, batch: DiffusionBatch, slope: Tensor, coefficients: Tensor) -> Tensor:
        """Computes gradients by the LoRA of weighted sums over steps.

            gradient_e = sum_bt coefficients_ebt d(quantity_bt) / d(LoRA)

        The gradient of each step is taken once and serves all E sums.

        Args:
          batch: the recorded steps.
          slope: derivative of the quantity by the velocity, [B, T, D].
          coefficients: [E, B, T].

        Returns:
          [E, P].
        """
        x = batch.all_latents[:, :-1].flatten(0, 1)
        times = batch.all_timesteps.flatten()
        classes = step_classes(batch)
        lora = self.lora()
        total = torch.zeros(())
        cotangents = slope.flatten(0, 1)
        weights = coefficients.flatten(1)
        for rows in torch.arange(len(x)).split(CHUNK):
            found = _step_gradients(
                self.network, lora, x[rows], times[rows], classes[rows], cotangents[rows]
            )
            total = total + weights[:, rows] @ found
        return total


def step_classes(batch: DiffusionBatch) -> Tensor:
    """Returns the class of every recorded step, [B * T]."""
    classes = batch.conditioning.embeds[batch.prompt_index].flatten()
    return classes.repeat_interleave(batch.num_steps)


def _step_gradients(
    network: nn.Module, lora: Lora, x: Tensor, times: Tensor, classes: Tensor, cotangents: Tensor
) -> Tensor:
    """Gradients [N, P] of <velocity, cotangent> at each of N steps, for cotangents [N, D]."""

    def product(lora: Lora, x: Tensor, time: Tensor, label: Tensor, cotangent: Tensor) -> Tensor:
        labels = torch.stack([label, torch.full_like(label, CLASSES)])
        given = (x.expand(2, -1), time.expand(2), labels)
        conditional, unconditional = functional_call(network, dict(lora), given)
        return cotangent @ (unconditional + GUIDANCE * (conditional - unconditional))

    found = vmap(grad(product), in_dims=(None, 0, 0, 0, 0))(lora, x, times, classes, cotangents)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], 1)

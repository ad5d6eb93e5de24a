"""The problem of the gradient study: data, reward, a trained network, batches, and evaluation.

Each of `CLASSES` prompts has two modes, and the reward prefers one of them, smoothly. The data is
drawn, the model trained and the policy moved from fixed seeds, in seconds; nothing is stored.

Legend: B samples, T steps of the SDE window, D elements of a sample.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from flow import CLASSES, GUIDANCE, Lora, Network, Sampler, step_classes
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.core.kl import gaussian_kl
from flowgrpo_rc.core.random import generator
from flowgrpo_rc.core.transition import GaussianSteps, centered_log_ratio, log_prob
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.policies.flow import sample_trajectory
from flowgrpo_rc.policies.scheduler import step_transition
from flowgrpo_rc.rollout.quantization import quantize

RANK = 2
# The sampling.
STEPS = 6
NOISE_LEVEL = 0.7
PROMPTS = 64  # of a batch
SAMPLES = 16  # of a prompt


class Evaluation(NamedTuple):
    """A policy on the recorded steps of a batch.

    Attributes:
      log_probs: [B, T].
      gaussian: the Gaussians of the steps, with KL from and centered log-ratio to the rollout.
      means: their means, [B, T, D].
      old_kl: KL from the old policy of decoupled mode, [B, T]; 0 where the two are the same.
      slopes: derivatives by the velocity of the log-prob, of the KL from the rollout and of the
        KL from the old policy, [3, B, T, D]. Those of the centered log-ratio are the sum of the
        first two.
    """

    log_probs: Tensor
    gaussian: GaussianSteps
    means: Tensor
    old_kl: Tensor
    slopes: Tensor


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


def evaluate(policy: Sampler, batch: DiffusionBatch, old_means: Tensor | None = None) -> Evaluation:
    """Evaluates a policy on every recorded step of a batch.

    Args:
      policy: the policy.
      batch: a batch with the means of the rollout.
      old_means: means of the old policy in decoupled mode, [B, T, D]; None if it is this policy.
    """
    assert batch.prev_sample_mean is not None
    x = batch.all_latents[:, :-1]
    x_next = batch.all_latents[:, 1:].flatten(0, 1)
    rollout = batch.prev_sample_mean.flatten(0, 1)
    shape = x.shape[:2]
    steps = batch.step_indices.flatten()
    v = policy.velocity(x.flatten(0, 1), batch.all_timesteps.flatten(), step_classes(batch))
    v = v.detach().requires_grad_()
    step = step_transition(
        x.flatten(0, 1), v, batch.sigmas, steps, sde_type="sde", noise_level=NOISE_LEVEL
    )
    means = step.mean.detach().unflatten(0, shape)
    old = means if old_means is None else old_means
    values = (
        log_prob(step, x_next),
        gaussian_kl(step.mean, rollout, step.std),
        gaussian_kl(step.mean, old.flatten(0, 1), step.std),
    )
    slopes = [torch.autograd.grad(one.sum(), v, retain_graph=True)[0] for one in values]
    value, kl, old_kl = (one.detach().view(shape) for one in values)
    centered = centered_log_ratio(step, rollout, x_next).detach().view(shape)
    dt = (batch.sigmas[steps + 1] - batch.sigmas[steps]).view(shape)
    gaussian = GaussianSteps(step.std.view(shape), dt, kl, centered)
    return Evaluation(
        value, gaussian, means, old_kl, torch.stack([one.unflatten(0, shape) for one in slopes])
    )


def plain(replica: nn.Module, like: nn.Module) -> nn.Module:
    """Returns a network in float64 with the weights of a replica, quantized ones as numbers.

    It lacks the replica's rounding of activations.

    Args:
      replica: a copy of the network in any precision.
      like: the network.
    """
    copied = copy.deepcopy(like).double()
    copied.load_state_dict(
        {name: p.dequantize().double() for name, p in replica.named_parameters()}
    )
    return copied

"""Held-out evaluation: ODE samples with fixed seeds, scored by the training rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt, Rewards, SamplerSpec
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rewards.manager import RewardHandle, RewardManager
from flowgrpo_rc.rollout.base import RolloutConfig
from flowgrpo_rc.rollout.diffusers_engine import encode_unique
from flowgrpo_rc.training.processes import Processes

GRID_SIZE = 16


class Evaluation(NamedTuple):
    """metrics: `reward` and its parts, not yet reduced; images [N, H, W, 3] uint8 and captions of the first prompts."""

    metrics: MetricBag
    images: np.ndarray
    captions: Sequence[str]


class Evaluator:
    """Samples the held-out prompts with the trainer's own weights, in the trainer's precision.

    Each prompt has one image whose noise follows from (rollout.val_kwargs.seed, position of the prompt), so the
    images of two evaluations differ by the weights alone. No training randomness is consumed.
    """

    def __init__(
        self, policy: FlowPolicy, prompts: Sequence[Prompt], config: RolloutConfig, rewards: RewardManager
    ) -> None:
        self._policy, self._rewards, self._config = policy, rewards, config.val_kwargs
        self._prompts = list(prompts)[: config.val_kwargs.n]
        training = config.spec()
        self._spec = SamplerSpec(
            height=training.height,
            width=training.width,
            num_inference_steps=config.val_kwargs.num_inference_steps,
            guidance_scale=config.val_kwargs.guidance_scale,
            noise_level=0.0,
            sde_type="sde",
            log_prob_convention="gaussian",
            max_sequence_length=training.max_sequence_length,
            dtype="",
        )

    def run(self, processes: Processes) -> Evaluation:
        """Evaluate this process's contiguous share; the metrics are exact after reduction."""
        share = -(-len(self._prompts) // processes.count)
        prompts = self._prompts[processes.rank * share : (processes.rank + 1) * share]
        batches = [prompts[i : i + self._config.batch_size] for i in range(0, len(prompts), self._config.batch_size)]
        shown: list[np.ndarray] = []
        handles = []
        for batch in batches:
            images = self.sample(batch)
            handles.append(self._rewards.submit(images, batch))
            if sum(map(len, shown)) < GRID_SIZE:
                shown.append(images)
        bag = MetricBag()
        rewards = collect_rewards(self._rewards, handles, processes)
        record_rewards(bag, rewards, prefix="val", total="reward")
        images = np.concatenate([*shown, np.zeros((0, self._spec.height, self._spec.width, 3), np.uint8)])[:GRID_SIZE]
        captions = [
            f"{prompt.target or prompt.text} {score:.2f}"
            for prompt, score in zip(prompts, rewards.total[: len(images)].tolist(), strict=False)
        ]
        return Evaluation(bag, images, captions)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Images [N, H, W, 3] uint8, one per prompt."""
        model, spec = self._policy.model, self._spec
        latents, length = self._latents(prompts), spec.max_sequence_length
        negative = None
        if spec.guidance_scale > 1:
            negative = encode_unique(model, [p.negative_text for p in prompts], length)
        trajectory = self._policy.rollout(
            latents,
            encode_unique(model, [p.text for p in prompts], length),
            negative,
            spec,
            torch.empty((len(prompts), 0), dtype=torch.int64, device=model.device),
            lambda step: latents,
        )
        return model.decode(trajectory.final)

    def _latents(self, prompts: Sequence[Prompt]) -> Tensor:
        shape = self._policy.model.latent_shape(self._spec.height, self._spec.width)
        seeds = [derive_seed(self._config.seed, "evaluation", prompt.index) for prompt in prompts]
        return normal(shape, seeds, "latents").to(self._policy.model.device)


def collect_rewards(manager: RewardManager, handles: Sequence[RewardHandle], processes: Processes) -> Rewards:
    """Wait for the rewards of this process's samples; RewardError, on all processes, if too many have none.

    A process without samples takes part with empty columns, so that names and reductions agree.
    """
    nothing = torch.zeros(0, dtype=torch.float64)
    rewards = Rewards(total=nothing, valid=nothing.bool(), parts=dict.fromkeys(manager.part_keys, nothing))
    if handles:
        rewards = manager.collect(handles)
    failed = torch.tensor([*manager.count_failed(rewards).values(), len(rewards.total)], device=processes.device)
    *counts, total = processes.sum(failed).tolist()
    manager.check_failed_fraction(dict(zip(manager.names, counts, strict=True)), total)
    return rewards


def record_rewards(bag: MetricBag, rewards: Rewards, *, prefix: str, total: str) -> None:
    """`prefix/total` (the weighted sum), its `std`, every part, each over the samples that have one, and
    `failed_fraction`."""
    bag.mean(f"{prefix}/{total}", rewards.total, rewards.valid)
    bag.mean(f"{prefix}/_square", rewards.total**2, rewards.valid)
    bag.derive(f"{prefix}/std", (f"{prefix}/{total}", f"{prefix}/_square"), std_from_moments)
    bag.mean(f"{prefix}/failed_fraction", (~rewards.valid).double())
    for name, values in rewards.parts.items():
        bag.mean(f"{prefix}/{name}", values, ~values.isnan())

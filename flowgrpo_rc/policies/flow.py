"""A flow model as a stochastic policy: sampling and re-evaluation from the same transition code.

Legend: B samples, T steps of the SDE window, S denoising steps. All maths outside the transformer
is fp32 on the stored fp32 latents, with sigmas taken by index from one schedule, so that an fp32
replay in the same batch shape has a log-ratio of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, SamplerSpec
from flowgrpo_rc.core.kl import gaussian_kl
from flowgrpo_rc.core.transition import GaussianSteps, Transition, log_prob, reference_kl, sample
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.policies.base import Policy, nudge
from flowgrpo_rc.policies.scheduler import step_transition

NoiseSource = Callable[[int], Tensor]
Velocity = Callable[[Tensor, Tensor], Tensor]


class Trajectory(NamedTuple):
    """final [B, ...]; window_latents [B, T+1, ...]; log_probs [B, T]; the schedule that was walked;
    means [B, T, ...] of the window's steps, where they were asked for."""

    final: Tensor
    window_latents: Tensor
    log_probs: Tensor
    schedule: Schedule
    means: Tensor | None


class StepEvaluation(NamedTuple):
    """A policy on one recorded step: log_prob [B], its Gaussian with sigma and sigma_next [B], and
    the exact KL [B] from the means that the batch holds, if any."""

    log_prob: Tensor
    transition: Transition
    sigma: Tensor
    sigma_next: Tensor
    kl: Tensor | None

    @property
    def log_probs(self) -> Tensor:
        """[B, 1]."""
        return self.log_prob.unsqueeze(1)

    @property
    def gaussian(self) -> GaussianSteps:
        """[B, 1]."""
        std, kl = (
            self.transition.std.flatten(1)[:, :1],
            None if self.kl is None else self.kl.unsqueeze(1),
        )
        return GaussianSteps(std, (self.sigma_next - self.sigma).unsqueeze(1), kl)

    @property
    def means(self) -> Tensor:
        """[B, 1, ...]."""
        return self.transition.mean.unsqueeze(1)


class FlowPolicy(Policy[DiffusionBatch, StepEvaluation]):
    """`network`, a transformer, seen as a policy. Several policies (trainer, engine) share one
    FlowModel.
    """

    def __init__(
        self,
        model: FlowModel,
        network: Any,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.network = network
        self._autocast = autocast

    @torch.no_grad()
    def rollout(
        self,
        latents: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
        window: Tensor,
        noise: NoiseSource,
        *,
        keep_means: bool = False,
    ) -> Trajectory:
        """Denoise `latents` [B, ...] through the model's schedule, as `sample_trajectory` does."""
        schedule = self.model.schedule(spec)

        def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
            return self._velocity(x, timesteps, conditioning, negative, spec)

        return sample_trajectory(
            velocity, schedule, latents, spec, window, noise, keep_means=keep_means
        )

    def evaluate(self, batch: DiffusionBatch) -> StepEvaluation:
        """This policy on the recorded steps of a batch with T = 1; differentiable."""
        steps, timesteps = batch.step_indices[:, 0], batch.all_timesteps[:, 0]
        x, following = batch.all_latents[:, 0], batch.all_latents[:, 1]
        negative = None if batch.negative is None else batch.negative[batch.prompt_index]
        v = self._velocity(
            x, timesteps, batch.conditioning[batch.prompt_index], negative, batch.spec
        )
        step = _transition(x, v, batch.sigmas, steps, batch.spec)
        value = log_prob(step, following, convention=batch.spec.log_prob_convention)
        kl = None
        if batch.prev_sample_mean is not None:
            kl = gaussian_kl(step.mean, batch.prev_sample_mean[:, 0], step.std)
        return StepEvaluation(value, step, batch.sigmas[steps], batch.sigmas[steps + 1], kl)

    def pieces(self, micro: DiffusionBatch) -> Iterator[DiffusionBatch]:
        """One SDE step each: a forward of the transformer sees one timestep per sample."""
        return (micro.step(t) for t in range(micro.num_steps))

    def divergence(
        self, now: StepEvaluation, reference: StepEvaluation, piece: DiffusionBatch
    ) -> Tensor:
        """Gaussian KL of the reverse steps, with the scale that FlowGRPO uses
        (`core.transition.reference_kl`).
        """
        mean = reference.transition.mean
        kl = reference_kl(now.transition, mean, now.sigma, now.sigma_next, kind=piece.spec.sde_type)
        return kl.unsqueeze(1)

    def cells(self, batch: DiffusionBatch) -> Tensor:
        """The position in the schedule: late steps amplify what the velocity is off by."""
        return batch.step_indices

    def cell_names(self, batch: DiffusionBatch) -> Sequence[str]:
        """ts_{t} of each timestep of the schedule."""
        return [f"ts_{timestep}" for timestep in (batch.sigmas[:-1] * 1000).round().int().tolist()]

    def under(self, autocast: Callable[[], AbstractContextManager[Any]]) -> FlowPolicy:
        return FlowPolicy(self.model, self.network, autocast=autocast)

    def nudged(self) -> FlowPolicy:
        return _NudgedFlowPolicy(self.model, self.network, autocast=self._autocast)

    def _velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        with self._autocast():
            v = self.model.velocity(self.network, latents, timesteps, conditioning, negative, spec)
        return v.float()


class _NudgedFlowPolicy(FlowPolicy):
    def _velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        conditioning = self._moved(conditioning)
        negative = None if negative is None else self._moved(negative)
        return super()._velocity(latents, timesteps, conditioning, negative, spec)

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype, pooled = self.network.dtype, conditioning.pooled
        moved = None if pooled is None else nudge(pooled, dtype)
        return replace(conditioning, embeds=nudge(conditioning.embeds, dtype), pooled=moved)


@torch.no_grad()
def sample_trajectory(
    velocity: Velocity,
    schedule: Schedule,
    latents: Tensor,
    spec: SamplerSpec,
    window: Tensor,
    noise: NoiseSource,
    *,
    keep_means: bool = False,
) -> Trajectory:
    """Denoise `latents` [B, ...] through the schedule; steps of `window` [B, T] are stochastic and
    recorded.

    `velocity(x, timesteps)` is the model at x [B, ...] and timesteps [B], in fp32. `window` holds
    consecutive step indices per sample and may be empty (T = 0) for an ODE sample. `noise(s)` gives
    standard normal noise [B, ...] for step s. Outside its window a sample takes the deterministic
    step.
    """
    batch, length = window.shape
    states = latents.new_zeros((batch, length + 1, *latents.shape[1:]))
    log_probs = latents.new_zeros((batch, length))
    means = latents.new_zeros((batch, length, *latents.shape[1:])) if keep_means else None
    rows = torch.arange(batch, device=latents.device)
    stochastic = set(window.flatten().tolist())
    for index in range(spec.num_inference_steps):
        steps = torch.full((batch,), index, device=latents.device)
        v = velocity(latents, schedule.timesteps[steps])
        following = _transition(latents, v, schedule.sigmas, steps, spec, noise_level=0.0).mean
        if index in stochastic:
            position = index - window[:, 0]
            inside = (position >= 0) & (position < length)
            step = _transition(latents, v, schedule.sigmas, steps, spec)
            drawn = sample(step, noise(index))
            following = torch.where(
                inside.reshape((-1,) + (1,) * (latents.ndim - 1)), drawn, following
            )
            value = log_prob(step, following, convention=spec.log_prob_convention)
            picked, at = rows[inside], position[inside]
            states[picked, at], states[picked, at + 1] = latents[inside], following[inside]
            log_probs[picked, at] = value[inside]
            if means is not None:
                means[picked, at] = step.mean[inside]
        latents = following
    return Trajectory(latents, states, log_probs, schedule, means)


def _transition(
    x: Tensor,
    v: Tensor,
    sigmas: Tensor,
    steps: Tensor,
    spec: SamplerSpec,
    *,
    noise_level: float | None = None,
) -> Transition:
    level = spec.noise_level if noise_level is None else noise_level
    return step_transition(x, v, sigmas, steps, sde_type=spec.sde_type, noise_level=level)

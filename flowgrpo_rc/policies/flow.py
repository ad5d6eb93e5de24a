"""A flow model as a stochastic policy: sampling and re-evaluation through the same transition code.

Legend: B samples, T steps of the SDE window, S denoising steps of the schedule.

All maths outside the transformer is in fp32, on the stored fp32 latents. Sigmas are taken by index
from one schedule. So a replay in fp32 and in the same batch shape has a log-ratio of exactly 0.
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
from flowgrpo_rc.core.transition import (
    GaussianSteps,
    Transition,
    centered_log_ratio,
    log_prob,
    reference_kl,
    sample,
)
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.policies.base import Policy, nudge
from flowgrpo_rc.policies.scheduler import step_transition

NoiseSource = Callable[[int], Tensor]  # step index -> standard normal noise [B, ...]
Velocity = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], timesteps [B] -> velocity [B, ...]


class Trajectory(NamedTuple):
    """The result of sampling: the final latents, and a record of the window's steps.

    Attributes:
      final: the latents at sigma 0, [B, ...].
      window_latents: the states before and after the steps of the window, [B, T+1, ...].
      log_probs: log-probability of each step of the window, [B, T], in nats per element.
      schedule: the schedule that was walked.
      means: mean of each step of the window, [B, T, ...]; None unless they were asked for.
    """

    final: Tensor
    window_latents: Tensor
    log_probs: Tensor
    schedule: Schedule
    means: Tensor | None


class StepEvaluation(NamedTuple):
    """A flow policy on one recorded step of each sample.

    Attributes:
      log_prob: log-probability of the step, [B], in nats per element.
      transition: the Gaussian of the step.
      sigma: noise level before the step, [B].
      sigma_next: noise level after the step, [B].
      kl: exact KL from the old policy, [B], in nats per element; None if the batch holds no means.
      centered: centered log-ratio to the rollout, [B]; None if the batch does not hold its means.
    """

    log_prob: Tensor
    transition: Transition
    sigma: Tensor
    sigma_next: Tensor
    kl: Tensor | None
    centered: Tensor | None

    @property
    def log_probs(self) -> Tensor:
        """Returns the log-probability of the step, [B, 1]."""
        return self.log_prob.unsqueeze(1)

    @property
    def gaussian(self) -> GaussianSteps:
        """Returns the Gaussian of the step, [B, 1]."""
        std = self.transition.std.flatten(1)[:, :1]
        dt = (self.sigma_next - self.sigma).unsqueeze(1)
        kl = None if self.kl is None else self.kl.unsqueeze(1)
        centered = None if self.centered is None else self.centered.unsqueeze(1)
        return GaussianSteps(std, dt, kl, centered)

    @property
    def means(self) -> Tensor:
        """Returns the mean of the step, [B, 1, ...]."""
        return self.transition.mean.unsqueeze(1)


class FlowPolicy(Policy[DiffusionBatch, StepEvaluation]):
    """A transformer as a policy over denoising steps.

    The policies of the trainer and of an engine share one `FlowModel` and have a transformer each.

    Args:
      model: encodes, decodes and predicts velocities.
      network: the transformer of this policy.
      autocast: makes the context in which the transformer runs.
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
        group: Tensor | None = None,
        keep_means: bool = False,
    ) -> Trajectory:
        """Samples trajectories with `sample_trajectory`, on the schedule of the model.

        Args:
          latents: initial noise, [B, ...], fp32.
          conditioning: the encoded prompt of each sample.
          negative: the encoded negative prompt of each sample; None without guidance.
          spec: how to sample.
          window: step indices that are stochastic and recorded, int64, [B, T], consecutive.
          noise: returns standard normal noise, [B, ...], for a step index.
          group: number of each sample's prompt, [B]; needed with `spec.shared_prefix`.
          keep_means: record the means of the window's steps too.

        Returns:
          The final latents and the record of the window.
        """
        schedule = self.model.walked_schedule(spec)

        def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
            return self._velocity(x, timesteps, conditioning, negative, spec, group)

        return sample_trajectory(
            velocity, schedule, latents, spec, window, noise, keep_means=keep_means
        )

    def evaluate(self, piece: DiffusionBatch) -> StepEvaluation:
        """Evaluates this policy on one recorded step of each sample.

        Args:
          piece: a batch with T = 1.

        Returns:
          Log-probability and Gaussian of the step, differentiable in the weights.
        """
        x = piece.all_latents[:, 0]
        x_next = piece.all_latents[:, 1]
        steps = piece.step_indices[:, 0]
        conditioning = piece.conditioning[piece.prompt_index]
        negative = None if piece.negative is None else piece.negative[piece.prompt_index]
        # Samples of a group may have this state in common only at the same step.
        group = piece.group * len(piece.sigmas) + steps
        timesteps = piece.all_timesteps[:, 0]
        v = self._velocity(x, timesteps, conditioning, negative, piece.spec, group)
        step = _transition(x, v, piece.sigmas, steps, piece.spec)
        convention = piece.spec.log_prob_convention
        value = log_prob(step, x_next, convention=convention)
        kl = None
        old_means = piece.prev_sample_mean if piece.old_means is None else piece.old_means
        if old_means is not None:
            kl = gaussian_kl(step.mean, old_means[:, 0], step.std)
        centered = None
        if piece.prev_sample_mean is not None:
            rollout_mean = piece.prev_sample_mean[:, 0]
            centered = centered_log_ratio(step, rollout_mean, x_next, convention=convention)
        sigma = piece.sigmas[steps]
        sigma_next = piece.sigmas[steps + 1]
        return StepEvaluation(value, step, sigma, sigma_next, kl, centered)

    def pieces(self, micro: DiffusionBatch) -> Iterator[DiffusionBatch]:
        """Cuts a micro-batch into its SDE steps: a forward sees one timestep of each sample.

        Args:
          micro: the micro-batch, [b, T].

        Returns:
          T batches with one step each, in order.
        """
        return (micro.step(t) for t in range(micro.num_steps))

    def divergence(
        self, now: StepEvaluation, reference: StepEvaluation, piece: DiffusionBatch
    ) -> Tensor:
        """Computes the KL of the reverse steps with `core.transition.reference_kl`.

        Args:
          now: the current policy on the piece.
          reference: the reference policy on the piece.
          piece: the recorded steps, [B, 1].

        Returns:
          The divergence, [B, 1], in nats per element; differentiable in `now`.

        See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4.2.
        """
        kl = reference_kl(
            now.transition,
            reference.transition.mean,
            now.sigma,
            now.sigma_next,
            kind=piece.spec.sde_type,
        )
        return kl.unsqueeze(1)

    def cells(self, batch: DiffusionBatch) -> Tensor:
        """Returns the position of each step in the schedule, since the mismatch depends on it.

        Late steps have little noise, and so amplify an error of the velocity.

        Args:
          batch: the recorded steps, [B, T].

        Returns:
          int64, [B, T].
        """
        return batch.step_indices

    def cell_names(self, batch: DiffusionBatch) -> Sequence[str]:
        """Returns `ts_{t}` for each timestep t of the schedule.

        Args:
          batch: any batch of the run.

        Returns:
          S names, in the order of the schedule.
        """
        timesteps = (batch.sigmas[:-1] * 1000).round().int().tolist()
        return [f"ts_{timestep}" for timestep in timesteps]

    def under(self, autocast: Callable[[], AbstractContextManager[Any]]) -> FlowPolicy:
        """Returns this policy with another autocast around its transformer.

        Args:
          autocast: makes the context in which the transformer runs.

        Returns:
          A policy that shares the transformer.
        """
        return FlowPolicy(self.model, self.network, autocast=autocast)

    def nudged(self) -> FlowPolicy:
        """Returns this policy with the text embeddings moved by `nudge`.

        Returns:
          A policy that shares the transformer.
        """
        return _NudgedFlowPolicy(self.model, self.network, autocast=self._autocast)

    def _velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
        group: Tensor | None = None,
    ) -> Tensor:
        """Returns the velocity of this policy's transformer, [B, ...], in fp32.

        With `spec.shared_prefix` a state that samples of a group have in common is evaluated once.
        """
        place = None
        if spec.shared_prefix and group is not None:
            rows, place = distinct_rows(latents, group)
            latents, timesteps, conditioning = latents[rows], timesteps[rows], conditioning[rows]
            negative = None if negative is None else negative[rows]
        with self._autocast():
            v = self.model.velocity(self.network, latents, timesteps, conditioning, negative, spec)
        return v.float() if place is None else v.float()[place]


class _NudgedFlowPolicy(FlowPolicy):
    """A flow policy whose transformer is given moved text embeddings."""

    def _velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
        group: Tensor | None = None,
    ) -> Tensor:
        conditioning = self._moved(conditioning)
        negative = None if negative is None else self._moved(negative)
        return super()._velocity(latents, timesteps, conditioning, negative, spec, group)

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = self.network.dtype
        embeds = nudge(conditioning.embeds, dtype)
        pooled = None if conditioning.pooled is None else nudge(conditioning.pooled, dtype)
        return replace(conditioning, embeds=embeds, pooled=pooled)


def distinct_rows(states: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Finds rows that have the state of the first row of their group.

    Args:
      states: [B, ...].
      group: number of each row's group, int64, [B].

    Returns:
      The rows that are left when those are dropped, [R], and for each row the position of its
      state among them, [B].
    """
    first = (group.unsqueeze(1) == group).int().argmax(1)
    same = (states == states[first]).flatten(1).all(1)
    own = torch.arange(len(group), device=group.device)
    return torch.where(same, first, own).unique(return_inverse=True)


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
    """Samples by denoising, and records the stochastic steps.

    The steps of a sample's window follow the SDE, all others the deterministic ODE. With
    `spec.tail=ab2` the ODE steps from `spec.tail_start` on are of second order.

    Args:
      velocity: returns the velocity [B, ...] at a state x [B, ...] and timesteps [B], in fp32.
      schedule: the sigmas and timesteps to walk.
      latents: initial noise, [B, ...].
      spec: how to sample; number of steps, kind and noise level are used.
      window: step indices that are stochastic and recorded, int64, [B, T], consecutive in each
        row. T = 0 gives ODE samples.
      noise: returns standard normal noise, [B, ...], for a step index.
      keep_means: record the means of the window's steps too.

    Returns:
      The final latents and the record of the window.

    See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4; for the window, "MixGRPO",
    https://arxiv.org/abs/2507.21802.
    """
    num_samples, length = window.shape
    states = latents.new_zeros((num_samples, length + 1, *latents.shape[1:]))
    log_probs = latents.new_zeros((num_samples, length))
    means = None
    if keep_means:
        means = latents.new_zeros((num_samples, length, *latents.shape[1:]))
    rows = torch.arange(num_samples, device=latents.device)
    one_per_sample = (-1,) + (1,) * (latents.ndim - 1)
    # Read once to the host, so that the loop does not wait for the device at every step.
    stochastic = set(window.flatten().tolist())

    x = latents
    v_before = None
    for index in range(len(schedule.timesteps)):
        steps = torch.full((num_samples,), index, device=x.device)
        v = velocity(x, schedule.timesteps[steps])
        # Without noise the mean of the step is the step of the ODE.
        x_next = _transition(x, v, schedule.sigmas, steps, spec, noise_level=0.0).mean
        if v_before is not None and spec.tail == "ab2" and index >= (spec.tail_start or 0):
            # Noise in between would have moved the state to where the velocity is another one.
            smooth_B = window[:, -1] < index - 1
            curve = second_order(v, v_before, schedule.sigmas, index)
            x_next = x_next + torch.where(smooth_B.reshape(one_per_sample), curve, 0.0)
        if index in stochastic:
            # Windows may start at different steps: only some samples take this step as an SDE.
            position_B = index - window[:, 0]
            inside_B = (position_B >= 0) & (position_B < length)
            step = _transition(x, v, schedule.sigmas, steps, spec)
            x_drawn = sample(step, noise(index))
            x_next = torch.where(inside_B.reshape(one_per_sample), x_drawn, x_next)
            log_prob_B = log_prob(step, x_next, convention=spec.log_prob_convention)

            row = rows[inside_B]
            position = position_B[inside_B]
            states[row, position] = x[inside_B]
            states[row, position + 1] = x_next[inside_B]
            log_probs[row, position] = log_prob_B[inside_B]
            if means is not None:
                means[row, position] = step.mean[inside_B]
        x, v_before = x_next, v
    return Trajectory(x, states, log_probs, schedule, means)


def second_order(v: Tensor, v_before: Tensor, sigmas: Tensor, index: int) -> Tensor:
    """Computes what a step of the Adams-Bashforth method of order 2 adds to an Euler step.

        dt^2 / (2 dt_before) (v - v_before)

    Args:
      v: the velocity at the step, [B, ...].
      v_before: the velocity at the step before, [B, ...].
      sigmas: the schedule, [S+1].
      index: index of the step, at least 1.

    Returns:
      The term to add to the next state, [B, ...].

    See Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", section III.5, for
    steps of different lengths.
    """
    dt_before, dt = sigmas[index - 1 : index + 2].diff()
    return dt * dt / (2 * dt_before) * (v - v_before)


def _transition(
    x: Tensor,
    v: Tensor,
    sigmas: Tensor,
    steps: Tensor,
    spec: SamplerSpec,
    *,
    noise_level: float | None = None,
) -> Transition:
    """Computes the Gaussian of a step as `spec` says, or with another noise level."""
    level = spec.noise_level if noise_level is None else noise_level
    return step_transition(x, v, sigmas, steps, sde_type=spec.sde_type, noise_level=level)

"""A flow model as a stochastic policy: sampling and re-evaluation through the same transition code.

Legend: B samples, T steps of the SDE window, S denoising steps of the schedule; b samples and t
steps of one forward of the update, which sees them as b t rows.

All maths outside the transformer is in fp32, on the stored fp32 latents. Sigmas are taken by index
from one schedule. So a replay in fp32 and in the same batch shape has a log-ratio of exactly 0.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

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
from flowgrpo_rc.models.block_cache import BlockCache
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.policies.base import Evaluation, Policy, cut, nudge
from flowgrpo_rc.policies.scheduler import step_transition

NoiseSource = Callable[[int], Tensor]  # step index -> standard normal noise [B, ...]
Velocity = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], timesteps [B] -> velocity [B, ...]


class SdeWindow(NamedTuple):
    """The steps of a rollout that are stochastic and recorded."""

    # Indices in the schedule, int64, [B, T], consecutive in each row; T = 0 gives ODE samples.
    steps: Tensor
    noise: NoiseSource  # standard normal noise, [B, ...] on any device, for a step index
    keep_means: bool = False  # whether the means of the steps are recorded, too


def no_window(num_samples: int, device: torch.device) -> SdeWindow:
    """Returns a window without steps: samples follow the ODE alone, and no noise is drawn."""
    empty = torch.empty((num_samples, 0), dtype=torch.int64, device=device)
    return SdeWindow(empty, lambda step: empty)


class Trajectory(NamedTuple):
    """The result of sampling: the final latents, and a record of the window's steps."""

    final: Tensor  # the latents at sigma 0, [B, ...]
    window_latents: Tensor  # states before and after each step, [B, T+1, ...]; the final without T
    log_probs: Tensor  # of each step of the window, [B, T], in nats per element
    schedule: Schedule  # that was walked
    means: Tensor | None = None  # of each step of the window, [B, T, ...]; None unless asked for


@dataclass(eq=False, repr=False)
class FlowPolicy(Policy[DiffusionBatch]):
    """A transformer as a policy over denoising steps.

    The policies of the trainer and of an engine share one `FlowModel` and have a transformer each.
    A forward of the update evaluates `steps_per_forward` SDE steps of a sample, or all of its
    window for None. A rollout skips blocks of a network that has a `cache`.
    """

    model: FlowModel
    _: KW_ONLY
    steps_per_forward: int | None = 1
    cache: BlockCache | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a network that is none of the model's."""
        wanted = list(self.model.networks)
        components = list(transformers(self.network))
        if components != wanted:
            raise ValueError(
                f"a {type(self.model).__name__} samples with {' and '.join(wanted)}; the "
                f"network has {' and '.join(components)}: give model.network, or a copy of it"
            )

    @torch.no_grad()
    def rollout(
        self,
        latents: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
        window: SdeWindow,
        *,
        group: Tensor | None = None,
    ) -> Trajectory:
        """Samples trajectories with `sample_trajectory`, on the schedule of the model.

        Args:
          latents: initial noise, [B, ...], fp32.
          conditioning: the encoded prompt of each sample.
          negative: the encoded negative prompt of each sample; None without guidance.
          spec: how to sample.
          window: the stochastic steps.
          group: number of each sample's prompt, [B]; needed with `spec.shared_prefix`.
        """
        schedule = self.model.walked_schedule(spec)
        if self.cache is not None:
            self.cache.start(spec.cached_steps)

        def velocity(x: Tensor, timesteps: Tensor) -> Tensor:
            if self.cache is not None:
                self.cache.next_step()
            return self._velocity(x, timesteps, conditioning, negative, spec, group)

        trajectory = sample_trajectory(velocity, schedule, latents, spec, window)
        if self.cache is not None:
            self.cache.end()
        return trajectory

    def transition(self, piece: DiffusionBatch) -> Transition:
        """Computes the Gaussians of recorded steps, all in one forward.

        Args:
          piece: the recorded steps, [b, t].

        Returns:
          The Gaussian of each step in a row of its own, [b t, ...]: the steps of a sample follow
          each other. Differentiable in the weights.
        """
        x = piece.all_latents[:, :-1].flatten(0, 1)
        v = self.velocity(piece, x)
        spec = piece.spec
        return step_transition(
            x,
            v,
            piece.sigmas,
            piece.step_indices.flatten(),
            sde_type=spec.sde_type,
            noise_level=spec.noise_level,
        )

    def velocity(self, piece: DiffusionBatch, x: Tensor) -> Tensor:
        """Predicts velocities at the timesteps of recorded steps.

        Args:
          piece: the steps, [b, t].
          x: the states, one in a row, [b t, ...].

        Returns:
          The velocities, [b t, ...], fp32; differentiable in the weights.
        """
        # As the states are flattened: the steps of a sample follow each other.
        prompts = piece.prompt_index.repeat_interleave(piece.num_steps)
        (piece,) = piece.split(len(piece))
        assert piece.on_host is not None
        places, times = piece.on_host.flatten(0, 1).unbind(1)
        listed = places.long().tolist()
        negative = None if piece.negative is None else piece.negative.take(prompts, listed)
        timesteps = piece.all_timesteps.flatten()
        steps = piece.step_indices.flatten()
        # Samples of a group may have a state in common only at the same step, and steps of two
        # groups never: one number for each pair of both.
        group = piece.group.repeat_interleave(piece.num_steps) * len(piece.sigmas) + steps
        conditioning = piece.conditioning.take(prompts, listed)
        if len(self.model.networks) > 1:
            conditioning = replace(conditioning, timesteps=tuple(times.tolist()))
        return self._velocity(x, timesteps, conditioning, negative, piece.spec, group)

    def evaluate(self, piece: DiffusionBatch) -> Evaluation:
        """Evaluates this policy on recorded steps, all in one forward.

        Args:
          piece: the recorded steps, [b, t].

        Returns:
          Log-probabilities and Gaussians of the steps, differentiable in the weights.
        """

        def unfolded(rows: Tensor) -> Tensor:
            return rows.unflatten(0, (len(piece), piece.num_steps))

        step = self.transition(piece)
        # The state that was recorded, never one that is drawn again: the ratio is about this step.
        x_next = piece.all_latents[:, 1:].flatten(0, 1)
        convention = piece.spec.log_prob_convention
        kl = None
        # Without a recompute the old policy is the rollout's, and so are its means.
        old_means = piece.prev_sample_mean if piece.old_means is None else piece.old_means
        if old_means is not None:
            kl = unfolded(gaussian_kl(step.mean, old_means.flatten(0, 1), step.std))
        centered = None
        if piece.prev_sample_mean is not None:
            rollout_mean = piece.prev_sample_mean.flatten(0, 1)
            centered = unfolded(
                centered_log_ratio(step, rollout_mean, x_next, convention=convention)
            )
        std = unfolded(step.std.flatten(1)[:, 0])
        dt = piece.sigmas[piece.step_indices + 1] - piece.sigmas[piece.step_indices]
        return Evaluation(
            log_probs=unfolded(log_prob(step, x_next, convention=convention)),
            gaussian=GaussianSteps(std, dt, kl, centered),
            means=unfolded(step.mean),
        )

    def pieces(self, micro: DiffusionBatch) -> Iterator[DiffusionBatch]:
        """Cuts a micro-batch into batches of `steps_per_forward` steps; the last may have fewer."""
        size = self.steps_per_forward or micro.num_steps
        return (micro.steps(start, start + size) for start in range(0, micro.num_steps, size))

    def steps(
        self, piece: DiffusionBatch, now: Evaluation
    ) -> Iterator[tuple[DiffusionBatch, Evaluation]]:
        """Cuts an evaluated piece into its SDE steps, [b, 1] each."""
        return ((piece.step(t), cut(now, t)) for t in range(piece.num_steps))

    def divergence(self, now: Evaluation, reference: Evaluation, piece: DiffusionBatch) -> Tensor:
        """Computes the KL of the reverse steps with `core.transition.reference_kl`.

        It is [b, t], in nats per element, and differentiable in `now`.

        See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4.2.
        """
        assert now.means is not None
        assert now.gaussian is not None
        assert reference.means is not None
        mean = now.means.flatten(0, 1)
        steps = piece.step_indices.flatten()
        kl = reference_kl(
            Transition(mean, now.gaussian.std.reshape(-1, *[1] * (mean.ndim - 1))),
            reference.means.flatten(0, 1),
            piece.sigmas[steps],
            piece.sigmas[steps + 1],
            kind=piece.spec.sde_type,
        )
        return kl.view_as(now.log_probs)

    def cells(self, batch: DiffusionBatch) -> Tensor:
        """Returns the position of each step in the schedule, since the mismatch depends on it.

        Late steps have little noise, and so amplify an error of the velocity.
        """
        return batch.step_indices

    def cell_names(self, batch: DiffusionBatch) -> Sequence[str]:
        """Returns `ts_{t}` for each timestep t of the schedule.

        It is the whole schedule: the part that a rollout walks behind a sliding window changes.
        """
        sigmas = self.model.schedule(batch.spec).sigmas
        timesteps = (sigmas[:-1] * 1000).round().int().tolist()
        return [f"ts_{timestep}" for timestep in timesteps]

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
        if self._nudged:
            conditioning = self._moved(conditioning)
            negative = None if negative is None else self._moved(negative)
        place = None
        if spec.shared_prefix and group is not None:
            rows, place = distinct_rows(latents, group)
            latents = latents[rows]
            timesteps = timesteps[rows]
            conditioning = conditioning[rows]
            negative = None if negative is None else negative[rows]
            if self.cache is not None:
                self.cache.place = place
                self.cache.rows = rows
        with self.autocast():
            v = self.model.velocity(self.network, latents, timesteps, conditioning, negative, spec)
        # In fp32 from here on: log-ratios are 1e-4, and bf16 resolves 4e-3.
        return v.float() if place is None else v.float()[place]

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(iter(transformers(self.network).values())).dtype
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
    # argmax of a bool row is its first True: the first row of the group.
    first = (group.unsqueeze(1) == group).int().argmax(1)
    same = (states == states[first]).flatten(1).all(1)
    every = torch.arange(len(group), device=group.device)
    return torch.where(same, first, every).unique(return_inverse=True)


@torch.no_grad()
def sample_trajectory(
    velocity: Velocity,
    schedule: Schedule,
    latents: Tensor,
    spec: SamplerSpec,
    window: SdeWindow,
) -> Trajectory:
    """Samples by denoising, and records the stochastic steps.

    The steps of a sample's window follow the SDE, all others the deterministic ODE. With
    `spec.tail=ab2` the ODE steps from `spec.tail_start` on are of second order.

    Args:
      velocity: returns the velocity [B, ...] at a state x [B, ...] and timesteps [B], in fp32.
      schedule: the sigmas and timesteps to walk.
      latents: initial noise, [B, ...].
      spec: how to sample; number of steps, kind and noise level are used.
      window: the stochastic steps.

    Returns:
      The final latents and the record of the window.

    See "Flow-GRPO", https://arxiv.org/abs/2505.05470, section 4; for the window, "MixGRPO",
    https://arxiv.org/abs/2507.21802.
    """
    record = _Record(latents, window)
    # Read once to the host, so that the loop does not wait for the device at every step.
    stochastic = set(window.steps.flatten().tolist())
    tail_start = (spec.tail_start or 0) if spec.tail == "ab2" else len(schedule.timesteps)
    sigmas = schedule.sigmas
    kind = spec.sde_type
    x = latents
    v_before = None
    for index in range(len(schedule.timesteps)):
        steps = torch.full((len(x),), index, device=x.device)
        v = velocity(x, schedule.timesteps[steps])

        # The ODE: without noise the mean of the step is its next state.
        x_next = step_transition(x, v, sigmas, steps, sde_type=kind, noise_level=0.0).mean
        if v_before is not None and index >= tail_start:
            # Noise in between would have moved the state to where the velocity is another one.
            smooth_B = (window.steps < index - 1).all(1)
            curve = second_order(v, v_before, sigmas, index)
            x_next = x_next + torch.where(_like(smooth_B, x), curve, 0.0)

        # The SDE: windows may start at different steps, so only some samples take this one.
        if index in stochastic:
            level = spec.noise_level
            step = step_transition(x, v, sigmas, steps, sde_type=kind, noise_level=level)
            inside_B = record.inside(index)
            drawn = sample(step, window.noise(index).to(x.device))
            x_next = torch.where(_like(inside_B, x), drawn, x_next)
            log_prob_B = log_prob(step, x_next, convention=spec.log_prob_convention)
            record.add(index, inside_B, x, x_next, log_prob_B, step.mean)
        x = x_next
        v_before = v
    states = record.states if window.steps.shape[1] else x.unsqueeze(1)
    return Trajectory(x, states, record.log_probs, schedule, record.means)


class _Record:
    """The steps of the windows, at the places that they have in them."""

    def __init__(self, latents: Tensor, window: SdeWindow) -> None:
        num_samples, length = window.steps.shape
        shape = latents.shape[1:]
        self._steps = window.steps
        # By place in the window: at one step of the schedule, samples may be at different places.
        self.states = latents.new_zeros((num_samples, length + 1, *shape))
        self.log_probs = latents.new_zeros((num_samples, length))
        self.means = latents.new_zeros((num_samples, length, *shape)) if window.keep_means else None

    def inside(self, index: int) -> Tensor:
        """Returns whose window holds a step, bool [B]."""
        position_B = index - self._steps[:, 0]
        return (position_B >= 0) & (position_B < self._steps.shape[1])

    def add(
        self,
        index: int,
        inside_B: Tensor,
        x: Tensor,
        x_next: Tensor,
        log_prob_B: Tensor,
        mean: Tensor,
    ) -> None:
        """Takes in a step of the samples that are inside of their windows."""
        # The host waits for the device once: an index by a mask waits each time.
        row = inside_B.nonzero().squeeze(1)
        position = index - self._steps[row, 0]
        self.states[row, position] = x[row]
        self.states[row, position + 1] = x_next[row]
        self.log_probs[row, position] = log_prob_B[row]
        if self.means is not None:
            self.means[row, position] = mean[row]


def _like(values_B: Tensor, x: Tensor) -> Tensor:
    """Returns one value of each sample in the form of its state, [B, 1, ...]."""
    return values_B.reshape(-1, *[1] * (x.ndim - 1))


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

"""Known faults of a rollout, each as a change of recorded steps in a replay.

A fault is believed if a replay that has it gives the engine's log-probs.

Shapes: B samples, T steps, S denoising steps of the schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, SamplerSpec
from flowgrpo_rc.calibration.measure import Copy, RecordedRollout, with_guidance
from flowgrpo_rc.calibration.prompts import CHANGES, changed, sampled_prompts
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.core.transition import sample as draw
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.policies.encode_prompts import encode_unique
from flowgrpo_rc.rollout.concat import concat

# Turns a recorded step into the step with a fault; returns None if there is no such step.
Change = Callable[[DiffusionBatch], DiffusionBatch | None]
State = Mapping[str, Tensor]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHIFTS = [2 ** (k / 2) for k in range(-4, 5)]  # of the schedule, relative to the configured one
SCALES = [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0]  # of the guidance, likewise
EMBEDDED = (1.0, 2.5, 3.5, 5.0, 7.0)  # usual guidance of transformers that take it as an input
# Sizes to try where there is no mismatch to explain.
TYPICAL_SHIFT = 1.1
TYPICAL_SCALE = 1.01
GOLDEN = (math.sqrt(5) - 1) / 2  # a search shrinks its interval by this in every round
TOLERANCE = 1e-4  # of a fitted size, relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A fault that was tried.

    Attributes:
      cause: its family, a key of `causes.REMEDIES`.
      fault: the fault in words.
      residual: mean |difference| between a replay with it and the engine.
    """

    cause: str
    fault: str
    residual: float


class Lora(NamedTuple):
    """The trainer's LoRA tensors at three points in time.

    Attributes:
      start: before any movement.
      before: before the last movement.
      current: those that the engine was given last.
    """

    start: State
    before: State
    current: State


class Replay:
    """Replays recorded steps with a copy of the trainer's network in the engine's precision.

    Args:
      copy: the copy.
      rollout: the recorded steps.
      lora: the trainer's LoRA tensors.
      lora_scale: alpha / rank.

    Attributes:
      model: the trainer's model.
      log_probs: of a replay without any fault, [B, T].
      as_recorded: mean |difference| between it and the engine.
    """

    def __init__(self, copy: Copy, rollout: RecordedRollout, lora: Lora, lora_scale: float) -> None:
        self._copy = copy
        self._rollout = rollout
        self._lora = lora
        self._lora_scale = lora_scale
        self.model = copy.model
        self._batch = rollout.batch
        self._spec = rollout.batch.spec
        self._timesteps = self.model.walked_schedule(self._spec).timesteps
        self.log_probs = self._changed(lambda piece: piece)
        self.as_recorded = distance(self.log_probs, rollout.recorded)

    def trials(self) -> Iterator[Trial]:
        """Tries every fault that has no size."""
        yield from self._dropped()
        yield from self._rounded_timesteps()
        yield from self._rounded_latents()
        yield from self._window()
        yield from self._weights()
        yield from self.prompt_trials()

    def prompt_trials(self) -> Iterator[Trial]:
        """Tries texts that were changed before they were encoded, where a change has an effect."""
        prompts = sampled_prompts(self._rollout)
        for name, change in CHANGES.items():
            others = changed(prompts, change)
            if others is not None:
                residual = self._residual(self._encoded(others))
                yield Trial(cause="prompt", fault=f"prompts {name}", residual=residual)

    def sized_trials(self, *, fitted: bool) -> Iterator[Trial]:
        """Tries every fault that has a size.

        Args:
          fitted: True fits the size to the record, False tries a typical one.
        """
        yield self._schedule(fitted)
        yield self._guidance(self.model.cfg_key, fitted)
        if self.model.embeds_guidance:
            yield self._guidance("guidance_scale", fitted)

    def _dropped(self) -> Iterator[Trial]:
        """Tries no guidance, and no shift of the schedule."""
        asked = self.model.cfg_scale(self._spec)
        if asked > 1:
            key = self.model.cfg_key
            none = self.model.cfg_value(1.0)
            wanted = self.model.cfg_value(asked)
            spec = with_guidance(self._spec, key, none)
            residual = self._residual(lambda piece: piece.replace(spec=spec, negative=None))
            yield Trial(cause="guidance", fault=dropped(key, none, wanted), residual=residual)
        plain = unshifted(self.model, self._spec)
        if not torch.equal(plain.timesteps, self._timesteps):
            residual = self._residual(partial(take_schedule, schedule=plain))
            fault = "shift dropped: the schedule is that of shift 1"
            yield Trial(cause="schedule", fault=fault, residual=residual)

    def _encoded(self, prompts: Sequence[Prompt]) -> Change:
        """Returns the change to the conditioning of other prompts, one for each sample."""
        conditioning = encode_unique(self.model, prompts, self._spec)
        rows = torch.arange(len(prompts), device=self._batch.prompt_index.device)
        return lambda piece: piece.replace(
            conditioning=conditioning,
            prompt_index=rows,
            negative=None if piece.negative is None else piece.negative[piece.prompt_index],
        )

    def _schedule(self, fitted: bool) -> Trial:
        def residual(shift: float) -> float:
            return self._residual(partial(shift_schedule, timesteps=self._timesteps, shift=shift))

        shift = fit(residual, SHIFTS) if fitted else TYPICAL_SHIFT
        return Trial(
            cause="schedule", fault=f"sigmas shifted by {shift:.4g}", residual=residual(shift)
        )

    def _rounded_timesteps(self) -> Iterator[Trial]:
        for name, dtype in HALF.items():
            residual = self._residual(partial(round_timesteps, dtype=dtype))
            yield Trial(cause="timestep", fault=f"timesteps rounded to {name}", residual=residual)

    def _rounded_latents(self) -> Iterator[Trial]:
        """Tries latents rounded before a step, after a step, or in the record.

        A replay can round the latents that a step starts from. What was rounded after its log-prob
        was taken is lost. Then the pattern of the mismatch is compared with that of steps of our
        own, made from the same noise.
        """
        observed = self.log_probs - self._rollout.recorded
        sampled = self._sampled_again()
        stepped = self._stepped_again()
        for name, dtype in HALF.items():
            residual = self._residual(partial(round_start, dtype=dtype))
            yield Trial(
                cause="latents", fault=f"latents rounded to {name} before a step", residual=residual
            )
            for fault, again, first in (
                (f"latents recorded in {name}", sampled, 0),
                (f"latents rounded to {name} after a step", stepped, 1),
            ):
                assert again.rollout_log_probs is not None
                rounded = self._copy.log_probs(round_states(again, dtype, first))
                pattern = rounded - again.rollout_log_probs
                yield Trial(cause="latents", fault=fault, residual=distance(pattern, observed))

    def _guidance(self, key: str, fitted: bool) -> Trial:
        """Tries another guidance: classifier-free, or the one that the transformer gets."""
        batch = self._batch
        classifier_free = key == self.model.cfg_key
        asked = self.model.cfg_scale(self._spec) if classifier_free else self._spec.guidance_scale
        negative = batch.negative
        if negative is None and classifier_free:
            prompts = self._rollout.request.prompts.prompts
            negative = encode_unique(self.model, prompts, self._spec, negative=True)

        def value(scale: float) -> float:
            return self.model.cfg_value(scale) if classifier_free else scale

        def residual(factor: float) -> float:
            spec = with_guidance(batch.spec, key, value(asked * factor))
            return self._residual(lambda piece: piece.replace(spec=spec, negative=negative))

        usual = () if classifier_free else (TYPICAL_SCALE, *(scale / asked for scale in EMBEDDED))
        factor = fit(residual, sorted({*SCALES, *usual})) if fitted else TYPICAL_SCALE
        scale = asked * factor
        if math.isclose(scale, 1.0, rel_tol=1e-3) and asked > 1:
            fault = dropped(key, value(1.0), value(asked))
        else:
            fault = f"{key} {value(scale):.4g} in place of {value(asked):g}"
        return Trial(cause="guidance", fault=fault, residual=residual(factor))

    def _window(self) -> Iterator[Trial]:
        ours = self.log_probs
        theirs = self._rollout.recorded
        for by, where in ((-1, "earlier"), (1, "later")):
            residual = self._residual(partial(move_step, timesteps=self._timesteps, by=by))
            yield Trial(
                cause="window", fault=f"steps are one {where} than recorded", residual=residual
            )
            if self._batch.num_steps > 1:
                moved = ours.roll(-by, 1)
                inside = slice(0, -1) if by > 0 else slice(1, None)
                residual = distance(moved[:, inside], theirs[:, inside])
                yield Trial(
                    cause="window", fault=f"log-probs are of one step {where}", residual=residual
                )

    def _weights(self) -> Iterator[Trial]:
        current = self._lora.current
        changed: Sequence[tuple[str, str, State]] = (
            ("lora", "LoRA not applied", scaled(current, 0.0)),
            ("lora", "LoRA applied without alpha / rank", scaled(current, 1 / self._lora_scale)),
            ("weights", "weights of the version before", self._lora.before),
            ("weights", "weights of the start", self._lora.start),
        )
        for cause, fault, state in changed:
            self._copy.load(state)
            yield Trial(cause=cause, fault=fault, residual=self._residual(lambda piece: piece))
        self._copy.load(current)

    def _changed(self, change: Change) -> Tensor:
        """Returns log-probs [B, T] with every step changed; nan where there is no such step."""
        columns = []
        for t in range(self._batch.num_steps):
            piece = change(self._batch.step(t))
            if piece is None:
                recorded = self._rollout.recorded[:, t : t + 1]
                columns.append(torch.full_like(recorded, math.nan))
            else:
                columns.append(self._copy.log_probs(piece))
        return torch.cat(columns, 1)

    def _residual(self, change: Change) -> float:
        return distance(self._changed(change), self._rollout.recorded)

    def _sampled_again(self) -> DiffusionBatch:
        """Returns what the copy samples from the same seeds."""
        batches = []
        first = 0
        for rows in self._rows():
            seeds = self._rollout.request.latent_seeds[first : first + len(rows)]
            first += len(rows)
            shape = rows.all_latents.shape[2:]
            trajectory = self._copy.policy.rollout(
                normal(shape, seeds, "latents").to(rows.all_latents.device),
                rows.conditioning[rows.prompt_index],
                None if rows.negative is None else rows.negative[rows.prompt_index],
                rows.spec,
                rows.step_indices,
                partial(noise, rows),
            )
            states = trajectory.window_latents
            log_probs = trajectory.log_probs
            batches.append(rows.replace(all_latents=states, rollout_log_probs=log_probs))
        return concat(batches)

    @torch.no_grad()
    def _stepped_again(self) -> DiffusionBatch:
        """Takes every recorded step again with the copy and the same noise."""
        convention = self._batch.spec.log_prob_convention
        batches = []
        for rows in self._rows():
            states = [rows.all_latents[:, 0]]
            log_probs = []
            for t in range(rows.num_steps):
                step = self._copy.policy.transition(rows.step(t))
                states.append(draw(step, noise(rows, int(rows.step_indices[0, t]))))
                log_probs.append(log_prob(step, states[-1], convention=convention))
            batches.append(
                rows.replace(
                    all_latents=torch.stack(states, 1), rollout_log_probs=torch.stack(log_probs, 1)
                )
            )
        return concat(batches)

    def _rows(self) -> Iterator[DiffusionBatch]:
        """Yields the recorded samples in the batches in which they were sampled."""
        for start in range(0, len(self._batch), self._copy.rows):
            yield self._batch.rows(start, start + self._copy.rows)


def noise(batch: DiffusionBatch, step: int) -> Tensor:
    """Returns the noise [B, ...] that the samples drew at a step of the schedule."""
    return normal(batch.all_latents.shape[2:], batch.seed.tolist(), "step", step).to(
        batch.all_latents.device
    )


def dropped(key: str, none: float, asked: float) -> str:
    """Returns the fault of an engine that takes no account of the guidance, in words.

    Args:
      key: guidance_scale or true_cfg_scale.
      none: its value without guidance.
      asked: its value that was asked for.
    """
    return f"guidance dropped: {key} {none:g} in place of {asked:g}"


class _Rescheduled:
    """A pipeline with another scheduler.

    Args:
      pipeline: what everything else is taken from.
      scheduler: the scheduler.
    """

    def __init__(self, pipeline: Any, scheduler: Any) -> None:
        self._pipeline = pipeline
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


def unshifted(model: FlowModel, spec: SamplerSpec) -> Schedule:
    """Returns the schedule that the model's scheduler has without any shift.

    Args:
      model: the trainer's model.
      spec: how to sample.
    """
    scheduler = model.scheduler
    none = {"shift": 1.0, "flow_shift": 1.0, "use_dynamic_shifting": False}
    known = {name: value for name, value in none.items() if name in scheduler.config}
    other = copy.copy(model)
    plain = type(scheduler).from_config(scheduler.config, **known)
    other.pipeline = _Rescheduled(model.pipeline, plain)
    return other.walked_schedule(spec)


def take_schedule(piece: DiffusionBatch, schedule: Schedule) -> DiffusionBatch:
    """Moves a step to the same place of another schedule."""
    timesteps = schedule.timesteps[piece.step_indices]
    return piece.replace(sigmas=schedule.sigmas, all_timesteps=timesteps)


def shift_schedule(piece: DiffusionBatch, timesteps: Tensor, shift: float) -> DiffusionBatch:
    """Moves a step to the schedule shift x sigma / (1 + (shift - 1) x sigma).

    Args:
      piece: one step of the samples.
      timesteps: of the configured schedule, [S]; they move in proportion to the sigmas.
      shift: 1 changes nothing.
    """
    sigmas = shift * piece.sigmas / (1 + (shift - 1) * piece.sigmas)
    moved = timesteps * (sigmas / piece.sigmas)[:-1]
    return piece.replace(sigmas=sigmas, all_timesteps=moved[piece.step_indices])


def round_timesteps(piece: DiffusionBatch, dtype: torch.dtype) -> DiffusionBatch:
    """Rounds the timesteps to a precision."""
    return piece.replace(all_timesteps=piece.all_timesteps.to(dtype).float())


def round_start(piece: DiffusionBatch, dtype: torch.dtype) -> DiffusionBatch:
    """Starts the step from rounded latents; its end stays as recorded."""
    start, end = piece.all_latents.unbind(1)
    return piece.replace(all_latents=torch.stack([start.to(dtype).float(), end], 1))


def round_states(batch: DiffusionBatch, dtype: torch.dtype, first: int) -> DiffusionBatch:
    """Rounds recorded states.

    Args:
      batch: the samples.
      dtype: the precision to round to.
      first: index of the first state that is rounded; 0 is the start of the first step.
    """
    states = batch.all_latents
    rounded = torch.cat([states[:, :first], states[:, first:].to(dtype).float()], 1)
    return batch.replace(all_latents=rounded)


def move_step(piece: DiffusionBatch, timesteps: Tensor, by: int) -> DiffusionBatch | None:
    """Moves a step to another place of the schedule, with the same latents; None if there is none.

    Args:
      piece: one step of the samples.
      timesteps: of the schedule, [S].
      by: number of steps.
    """
    steps = piece.step_indices + by
    if not 0 <= int(steps.min()) <= int(steps.max()) < len(timesteps):
        return None
    return piece.replace(step_indices=steps, all_timesteps=timesteps[steps])


def scaled(state: State, factor: float) -> dict[str, Tensor]:
    """Returns a LoRA whose effect is `factor` times as large."""
    return {
        name: tensor * factor if ".lora_B." in name else tensor for name, tensor in state.items()
    }


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the mean |difference| where `ours` is a number; inf if it is a number nowhere."""
    known = ~ours.isnan()
    return (ours - theirs)[known].double().abs().mean().item() if known.any() else math.inf


def fit(residual: Callable[[float], float], grid: Sequence[float]) -> float:
    """Returns the positive number with the least residual.

    It is found by golden-section search, on a logarithmic scale, around the best number of a grid.
    Settings are usually short numbers, so a shorter number wins if it is as good. The number of the
    grid wins if the residual has several valleys and the search ends in a shallower one.

    Args:
      residual: the function to minimise.
      grid: positive numbers, ascending.
    """
    best = min(range(len(grid)), key=lambda index: residual(grid[index]))
    low = math.log(grid[max(best - 1, 0)])
    high = math.log(grid[min(best + 1, len(grid) - 1)])
    # Each round looks at two places, one of which is a place of the round before. Rounding makes
    # the two equal, so the cache has its residual.
    at = lru_cache(maxsize=None)(lambda place: residual(math.exp(place)))
    while high - low > TOLERANCE:
        left = high - GOLDEN * (high - low)
        right = low + GOLDEN * (high - low)
        if at(round(left, 9)) < at(round(right, 9)):
            high = right
        else:
            low = left
    found = math.exp((low + high) / 2)
    # min returns the first of equals, so the shortest number comes first.
    shorter = [float(f"{found:.{digits}g}") for digits in (1, 2, 3, 4)]
    return min([*shorter, found, grid[best]], key=residual)

"""Known faults of a rollout, each as a change of recorded steps in a replay.

A fault is believed if a replay that has it gives the engine's log-probs.

Shapes: B samples, T steps, S denoising steps of the schedule.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, Prompt, SamplerSpec
from flowgrpo_rc.calibration.measure import Copy, RecordedRollout, with_guidance
from flowgrpo_rc.calibration.noise import HALF
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.schedule import shift_sigmas
from flowgrpo_rc.core.search import fit
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.core.transition import sample as draw
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.monitoring.noise import seed_noise
from flowgrpo_rc.policies.encode_prompts import encode_unique
from flowgrpo_rc.policies.flow import SdeWindow
from flowgrpo_rc.rollout.concat import concat

# Turns a recorded step into the step with a fault, or into None if there is no such step.
Change = Callable[[DiffusionBatch], DiffusionBatch | None]
State = Mapping[str, Tensor]

SHIFTS = [2 ** (k / 2) for k in range(-4, 5)]  # of the schedule, relative to the configured one
SCALES = [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0]  # of the guidance, likewise
EMBEDDED = (1.0, 2.5, 3.5, 5.0, 7.0)  # usual guidance of transformers that take it as an input
# Sizes to try where there is no mismatch to explain.
TYPICAL_SHIFT = 1.1
TYPICAL_SCALE = 1.01
# What may be done to the text of a prompt.
TEXTS: Mapping[str, Callable[[str], str]] = {
    "stripped": str.strip,
    "whitespace collapsed": lambda text: " ".join(text.split()),
    "newlines turned to spaces": lambda text: text.replace("\n", " "),
    "newlines left out": lambda text: text.replace("\n", ""),
    "lower case": str.lower,
}
PLACES = {-1: "earlier", 1: "later"}  # of a schedule
# Training prompts need not have whitespace that an engine could change.
PLANTED = "  a  b\nc \n"


class Trial(NamedTuple):
    """A fault that was tried."""

    cause: str  # a name of the table of causes
    fault: str  # in words
    residual: float  # mean |difference| between a replay with it and the engine


class Lora(NamedTuple):
    """The trainer's LoRA tensors."""

    start: State  # before any movement
    before: State  # before the last one
    current: State  # as the engine was given them last

    def wrong_states(self, scale: float) -> Iterator[tuple[str, str, State]]:
        """Yields what an engine may hold in place of the current ones: cause, fault, tensors."""
        yield "lora", "LoRA not applied", scaled(self.current, 0.0)
        yield "lora", "LoRA applied without alpha / rank", scaled(self.current, 1 / scale)
        yield "weights", "weights of the version before", self.before
        yield "weights", "weights of the start", self.start


class Replay:
    """Replays recorded steps with a copy of the trainer's network in the engine's precision."""

    def __init__(self, copy: Copy, rollout: RecordedRollout, lora: Lora, lora_scale: float) -> None:
        self._copy = copy
        self._rollout = rollout
        self.recorded = rollout.recorded  # the engine's log-probs, [B, T]
        self._lora = lora
        self._lora_scale = lora_scale
        self._model = copy.model
        self._batch = rollout.batch
        self._spec = rollout.batch.spec
        self._timesteps = self._model.walked_schedule(self._spec).timesteps
        self.log_probs = self._replayed(_as_it_is)  # of a replay without any fault, [B, T]
        self.as_recorded = distance(self.log_probs, self.recorded)

    def trials(self) -> Iterator[Trial]:
        """Tries every fault that has no size."""
        for cause, fault, change in self._changes():
            yield Trial(cause, fault, self._residual(change))
        if self._rollout.request.seeds:  # else nobody knows the noise
            yield from self._lost_latents()
        yield from self._late_log_probs()
        for cause, fault, state in self._lora.wrong_states(self._lora_scale):
            self._copy.load(state)
            yield Trial(cause, fault, self._residual(_as_it_is))
        self._copy.load(self._lora.current)
        yield from self.prompt_trials()

    def prompt_trials(self) -> Iterator[Trial]:
        """Tries texts that were changed before they were encoded, where a change has an effect."""
        rows = torch.arange(len(self._batch), device=self._batch.prompt_index.device)
        for name, prompts in other_prompts(self._rollout.prompts):
            conditioning = encode_unique(self._model, prompts, self._spec)
            residual = self._residual(partial(encoded, conditioning=conditioning, rows=rows))
            yield Trial("prompt", f"prompts {name}", residual)

    def sized_trials(self, *, fitted: bool) -> Iterator[Trial]:
        """Tries every fault that has a size, fitted to the record or else a typical one."""

        def residual(shift: float) -> float:
            return self._residual(partial(rescheduled, self._shifted(shift)))

        shift = fit(residual, SHIFTS) if fitted else TYPICAL_SHIFT
        yield Trial("schedule", f"sigmas shifted by {shift:.4g}", residual(shift))
        yield self.guidance_trial(self._model.cfg_key, fitted=fitted)
        if self._model.embeds_guidance:
            yield self.guidance_trial("guidance_scale", fitted=fitted)

    def _shifted(self, shift: float) -> Schedule:
        """Returns the schedule with shifted sigmas, its timesteps in proportion."""
        sigmas = self._batch.sigmas
        shifted = shift_sigmas(sigmas, shift)
        return Schedule(timesteps=self._timesteps * (shifted / sigmas)[:-1], sigmas=shifted)

    def _changes(self) -> Iterator[tuple[str, str, Change]]:
        """Yields the table of faults that change what a step starts from: cause, words, change."""
        model = self._model
        scale = model.cfg_scale(self._spec)
        if scale > 1:
            unguided = with_guidance(self._spec, model.cfg_key, model.cfg_value(1.0))
            fault = dropped(model.cfg_key, model.cfg_value, scale)
            yield "guidance", fault, lambda piece: piece.replace(spec=unguided, negative=None)
        plain = unshifted(model, self._spec)
        if not torch.equal(plain.timesteps, self._timesteps):
            fault = "shift dropped: the schedule is that of shift 1"
            yield "schedule", fault, partial(rescheduled, plain)
        for name, dtype in HALF.items():
            yield "timestep", f"timesteps rounded to {name}", partial(round_timesteps, dtype)
        for name, dtype in HALF.items():
            fault = f"latents rounded to {name} before a step"
            yield "latents", fault, partial(round_states, dtype, slice(0, 1))
        for by, where in PLACES.items():
            fault = f"steps are one {where} than recorded"
            yield "window", fault, partial(moved, self._timesteps, by)

    def _lost_latents(self) -> Iterator[Trial]:
        """Tries latents rounded after their log-prob was taken, after a step or in the record.

        What was rounded away then is lost. So the pattern of the mismatch is compared with that of
        steps of our own, made from the same noise.
        """
        observed = self.log_probs - self.recorded
        starts = range(0, len(self._batch), self._copy.rows)  # of the chunks that were sampled
        sampled = concat([self._sampled_again(start) for start in starts])
        stepped = concat([self._stepped_again(start) for start in starts])
        again = (
            ("latents recorded in {}", sampled, slice(0, None)),
            ("latents rounded to {} after a step", stepped, slice(1, None)),
        )
        for name, dtype in HALF.items():
            for fault, batch, which in again:
                assert batch.rollout_log_probs is not None
                rounded = self._copy.log_probs(round_states(dtype, which, batch))
                pattern = rounded - batch.rollout_log_probs
                yield Trial("latents", fault.format(name), distance(pattern, observed))

    def _late_log_probs(self) -> Iterator[Trial]:
        for by, where in PLACES.items() if self._batch.num_steps > 1 else ():
            inside = slice(0, -1) if by > 0 else slice(1, None)
            ours = self.log_probs.roll(-by, 1)[:, inside]
            residual = distance(ours, self.recorded[:, inside])
            yield Trial("window", f"log-probs are of one step {where}", residual)

    def guidance_trial(self, key: str, *, fitted: bool) -> Trial:
        """Tries another guidance: classifier-free, or the one that the transformer gets."""
        model = self._model
        negative = self._batch.negative
        value: Callable[[float], float] = float
        grid = SCALES
        if key == model.cfg_key:
            value = model.cfg_value
            scale = model.cfg_scale(self._spec)
            if negative is None:
                prompts = self._rollout.request.prompts.prompts
                negative = encode_unique(model, prompts, self._spec, negative=True)
        else:
            scale = self._spec.guidance_scale
            grid = sorted({*SCALES, TYPICAL_SCALE, *(usual / scale for usual in EMBEDDED)})

        def residual(factor: float) -> float:
            spec = with_guidance(self._spec, key, value(scale * factor))
            return self._residual(lambda piece: piece.replace(spec=spec, negative=negative))

        factor = fit(residual, grid) if fitted else TYPICAL_SCALE
        fault = f"{key} {value(scale * factor):.4g} in place of {value(scale):g}"
        if math.isclose(scale * factor, 1.0, rel_tol=1e-3) and scale > 1:
            fault = dropped(key, value, scale)
        return Trial("guidance", fault, residual(factor))

    def _replayed(self, change: Change) -> Tensor:
        """Returns log-probs [B, T] with every step changed; nan where there is no such step."""
        columns = []
        for t in range(self._batch.num_steps):
            piece = change(self._batch.step(t))
            no_such_step = torch.full_like(self.recorded[:, :1], math.nan)
            columns.append(no_such_step if piece is None else self._copy.log_probs(piece))
        return torch.cat(columns, 1)

    def _residual(self, change: Change) -> float:
        return distance(self._replayed(change), self.recorded)

    def _sampled_again(self, start: int) -> DiffusionBatch:
        """Returns what the copy samples from the same seeds as the chunk that begins there."""
        rows = self._batch.rows(start, start + self._copy.rows)
        seeds = self._rollout.request.latent_seeds[start : start + len(rows)]
        shape = rows.all_latents.shape[2:]
        trajectory = self._copy.policy.rollout(
            normal(shape, seeds, "latents").to(rows.all_latents.device),
            rows.conditioning[rows.prompt_index],
            None if rows.negative is None else rows.negative[rows.prompt_index],
            rows.spec,
            SdeWindow(rows.step_indices, partial(normal, shape, rows.seed.tolist(), "step")),
        )
        states = trajectory.window_latents
        return rows.replace(all_latents=states, rollout_log_probs=trajectory.log_probs)

    @torch.no_grad()
    def _stepped_again(self, start: int) -> DiffusionBatch:
        """Takes every recorded step of a chunk again with the copy and the same noise."""
        rows = self._batch.rows(start, start + self._copy.rows)
        noise = seed_noise(rows).to(rows.all_latents.device)
        states = [rows.all_latents[:, 0]]
        log_probs = []
        for t in range(rows.num_steps):
            step = self._copy.policy.transition(rows.step(t))
            states.append(draw(step, noise[:, t]))
            convention = self._spec.log_prob_convention
            log_probs.append(log_prob(step, states[-1], convention=convention))
        states_BT = torch.stack(states, 1)
        return rows.replace(all_latents=states_BT, rollout_log_probs=torch.stack(log_probs, 1))


def other_prompts(prompts: Sequence[Prompt]) -> Iterator[tuple[str, list[Prompt]]]:
    """Yields each change of `TEXTS` by name, with the changed prompts, if it changes any."""
    for name, change in TEXTS.items():
        changed = [replace(prompt, text=change(prompt.text)) for prompt in prompts]
        if changed != list(prompts):
            yield name, changed


def dropped(key: str, value: Callable[[float], float], scale: float) -> str:
    """Says that an engine guides by no scale; `value` of one stands in the key."""
    return f"guidance dropped: {key} {value(1.0):g} in place of {value(scale):g}"


def unshifted(model: FlowModel, spec: SamplerSpec) -> Schedule:
    """Returns the schedule that the model's scheduler has without any shift."""
    scheduler = model.scheduler
    none = {"shift": 1.0, "flow_shift": 1.0, "use_dynamic_shifting": False}
    known = {name: value for name, value in none.items() if name in scheduler.config}
    other = copy.copy(model)
    other.pipeline = copy.copy(model.pipeline)
    other.pipeline.scheduler = type(scheduler).from_config(scheduler.config, **known)
    return other.walked_schedule(spec)


# --- Changes of a step. `piece` holds one step of the samples.


def _as_it_is(piece: DiffusionBatch) -> DiffusionBatch:
    return piece


def encoded(piece: DiffusionBatch, conditioning: Conditioning, rows: Tensor) -> DiffusionBatch:
    """Conditions on other prompts, one for each sample."""
    negative = None if piece.negative is None else piece.negative[piece.prompt_index]
    return piece.replace(conditioning=conditioning, prompt_index=rows, negative=negative)


def rescheduled(schedule: Schedule, piece: DiffusionBatch) -> DiffusionBatch:
    """Moves a step to the same place of another schedule."""
    timesteps = schedule.timesteps[piece.step_indices]
    return piece.replace(sigmas=schedule.sigmas, all_timesteps=timesteps)


def round_timesteps(dtype: torch.dtype, piece: DiffusionBatch) -> DiffusionBatch:
    """Rounds the timesteps to a precision."""
    return piece.replace(all_timesteps=piece.all_timesteps.to(dtype).float())


def round_states(dtype: torch.dtype, which: slice, batch: DiffusionBatch) -> DiffusionBatch:
    """Rounds recorded states, [B, T+1]; the one with index 0 is where step 1 starts."""
    states = batch.all_latents.clone()
    states[:, which] = states[:, which].to(dtype).float()
    return batch.replace(all_latents=states)


def moved(timesteps: Tensor, by: int, piece: DiffusionBatch) -> DiffusionBatch | None:
    """Moves a step by some places of the schedule, with the same latents; None if there is none."""
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

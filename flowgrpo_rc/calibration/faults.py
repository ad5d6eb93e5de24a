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
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.schedule import shift_sigmas
from flowgrpo_rc.core.search import fit
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.core.transition import sample as draw
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.monitoring.noise import seed_noise
from flowgrpo_rc.policies.encode_prompts import encode_unique
from flowgrpo_rc.rollout.concat import concat

# Turns a recorded step into the step with a fault, or into None if there is no such step.
Change = Callable[[DiffusionBatch], DiffusionBatch | None]
State = Mapping[str, Tensor]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
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

    cause: str  # a key of `causes.REMEDIES`
    fault: str  # in words
    residual: float  # mean |difference| between a replay with it and the engine


class Lora(NamedTuple):
    """The trainer's LoRA tensors."""

    start: State  # before any movement
    before: State  # before the last one
    current: State  # as the engine was given them last


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
        current = self._lora.current
        states: Sequence[tuple[str, str, State]] = (
            ("lora", "LoRA not applied", scaled(current, 0.0)),
            ("lora", "LoRA applied without alpha / rank", scaled(current, 1 / self._lora_scale)),
            ("weights", "weights of the version before", self._lora.before),
            ("weights", "weights of the start", self._lora.start),
        )
        for cause, fault, state in states:
            self._copy.load(state)
            yield Trial(cause, fault, self._residual(_as_it_is))
        self._copy.load(current)
        yield from self.prompt_trials()

    def prompt_trials(self) -> Iterator[Trial]:
        """Tries texts that were changed before they were encoded, where a change has an effect."""
        rows = torch.arange(len(self._batch), device=self._batch.prompt_index.device)
        for name, others in other_prompts(self._rollout.prompts):
            conditioning = encode_unique(self._model, others, self._spec)
            residual = self._residual(partial(encoded, conditioning=conditioning, rows=rows))
            yield Trial("prompt", f"prompts {name}", residual)

    def sized_trials(self, *, fitted: bool) -> Iterator[Trial]:
        """Tries every fault that has a size, fitted to the record or else a typical one."""

        def residual(shift: float) -> float:
            return self._residual(partial(shifted, self._timesteps, shift))

        shift = fit(residual, SHIFTS) if fitted else TYPICAL_SHIFT
        yield Trial("schedule", f"sigmas shifted by {shift:.4g}", residual(shift))
        yield self.guidance_trial(self._model.cfg_key, fitted=fitted)
        if self._model.embeds_guidance:
            yield self.guidance_trial("guidance_scale", fitted=fitted)

    def _changes(self) -> Iterator[tuple[str, str, Change]]:
        """Yields the table of faults that change what a step starts from: cause, words, change."""
        model, spec = self._model, self._spec
        asked = model.cfg_scale(spec)
        if asked > 1:
            none = model.cfg_value(1.0)
            without = with_guidance(spec, model.cfg_key, none)
            fault = dropped(model.cfg_key, none, model.cfg_value(asked))
            yield "guidance", fault, lambda piece: piece.replace(spec=without, negative=None)
        plain = unshifted(model, spec)
        if not torch.equal(plain.timesteps, self._timesteps):
            fault = "shift dropped: the schedule is that of shift 1"
            yield "schedule", fault, partial(rescheduled, plain)
        for name, dtype in HALF.items():
            yield "timestep", f"timesteps rounded to {name}", partial(round_timesteps, dtype)
        for name, dtype in HALF.items():
            yield "latents", f"latents rounded to {name} before a step", partial(round_start, dtype)
        for by, where in PLACES.items():
            fault = f"steps are one {where} than recorded"
            yield "window", fault, partial(moved, self._timesteps, by)

    def _lost_latents(self) -> Iterator[Trial]:
        """Tries latents rounded after their log-prob was taken, after a step or in the record.

        What was rounded away then is lost. So the pattern of the mismatch is compared with that of
        steps of our own, made from the same noise.
        """
        observed = self.log_probs - self.recorded
        again = (
            ("latents recorded in {}", self._sampled_again(), 0),
            ("latents rounded to {} after a step", self._stepped_again(), 1),
        )
        for name, dtype in HALF.items():
            for fault, batch, first in again:
                assert batch.rollout_log_probs is not None
                rounded = self._copy.log_probs(round_states(batch, dtype, first))
                pattern = rounded - batch.rollout_log_probs
                yield Trial("latents", fault.format(name), distance(pattern, observed))

    def _late_log_probs(self) -> Iterator[Trial]:
        if self._batch.num_steps < 2:
            return
        for by, where in PLACES.items():
            inside = slice(0, -1) if by > 0 else slice(1, None)
            ours = self.log_probs.roll(-by, 1)[:, inside]
            residual = distance(ours, self.recorded[:, inside])
            yield Trial("window", f"log-probs are of one step {where}", residual)

    def guidance_trial(self, key: str, *, fitted: bool) -> Trial:
        """Tries another guidance: classifier-free, or the one that the transformer gets."""
        model, spec, negative = self._model, self._spec, self._batch.negative
        value: Callable[[float], float] = float
        if key == model.cfg_key:
            asked, value, grid = model.cfg_scale(spec), model.cfg_value, SCALES
            if negative is None:
                prompts = self._rollout.request.prompts.prompts
                negative = encode_unique(model, prompts, spec, negative=True)
        else:
            asked = spec.guidance_scale
            grid = sorted({*SCALES, TYPICAL_SCALE, *(scale / asked for scale in EMBEDDED)})

        def residual(factor: float) -> float:
            other = with_guidance(spec, key, value(asked * factor))
            return self._residual(lambda piece: piece.replace(spec=other, negative=negative))

        factor = fit(residual, grid) if fitted else TYPICAL_SCALE
        scale = asked * factor
        fault = f"{key} {value(scale):.4g} in place of {value(asked):g}"
        if math.isclose(scale, 1.0, rel_tol=1e-3) and asked > 1:
            fault = dropped(key, value(1.0), value(asked))
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

    def _sampled_again(self) -> DiffusionBatch:
        """Returns what the copy samples from the same seeds."""
        batches = []
        for start, rows in self._chunks():
            seeds = self._rollout.request.latent_seeds[start : start + len(rows)]
            trajectory = self._copy.policy.rollout(
                normal(rows.all_latents.shape[2:], seeds, "latents").to(rows.all_latents.device),
                rows.conditioning[rows.prompt_index],
                None if rows.negative is None else rows.negative[rows.prompt_index],
                rows.spec,
                rows.step_indices,
                partial(normal, rows.all_latents.shape[2:], rows.seed.tolist(), "step"),
            )
            states, log_probs = trajectory.window_latents, trajectory.log_probs
            batches.append(rows.replace(all_latents=states, rollout_log_probs=log_probs))
        return concat(batches)

    @torch.no_grad()
    def _stepped_again(self) -> DiffusionBatch:
        """Takes every recorded step again with the copy and the same noise."""
        convention = self._spec.log_prob_convention
        batches = []
        for _, rows in self._chunks():
            states, log_probs = [rows.all_latents[:, 0]], []
            noise = seed_noise(rows).to(rows.all_latents.device)
            for t in range(rows.num_steps):
                step = self._copy.policy.transition(rows.step(t))
                states.append(draw(step, noise[:, t]))
                log_probs.append(log_prob(step, states[-1], convention=convention))
            log_probs_BT = torch.stack(log_probs, 1)
            again = rows.replace(all_latents=torch.stack(states, 1), rollout_log_probs=log_probs_BT)
            batches.append(again)
        return concat(batches)

    def _chunks(self) -> Iterator[tuple[int, DiffusionBatch]]:
        """Yields the recorded samples as they were sampled, with the place of each first one."""
        for start in range(0, len(self._batch), self._copy.rows):
            yield start, self._batch.rows(start, start + self._copy.rows)


def other_prompts(prompts: Sequence[Prompt]) -> Iterator[tuple[str, list[Prompt]]]:
    """Yields each change of `TEXTS` by name, with the changed prompts, if it changes any."""
    for name, change in TEXTS.items():
        others = [replace(prompt, text=change(prompt.text)) for prompt in prompts]
        if others != list(prompts):
            yield name, others


def dropped(key: str, none: float, asked: float) -> str:
    """Says that an engine takes no account of the guidance, whose key has `none` without any."""
    return f"guidance dropped: {key} {none:g} in place of {asked:g}"


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


def shifted(timesteps: Tensor, shift: float, piece: DiffusionBatch) -> DiffusionBatch:
    """Moves a step to shifted sigmas, its timestep in proportion."""
    sigmas = shift_sigmas(piece.sigmas, shift)
    others = timesteps * (sigmas / piece.sigmas)[:-1]
    return piece.replace(sigmas=sigmas, all_timesteps=others[piece.step_indices])


def round_timesteps(dtype: torch.dtype, piece: DiffusionBatch) -> DiffusionBatch:
    """Rounds the timesteps to a precision."""
    return piece.replace(all_timesteps=piece.all_timesteps.to(dtype).float())


def round_start(dtype: torch.dtype, piece: DiffusionBatch) -> DiffusionBatch:
    """Starts the step from rounded latents; its end stays as recorded."""
    start, end = piece.all_latents.unbind(1)
    return piece.replace(all_latents=torch.stack([start.to(dtype).float(), end], 1))


def moved(timesteps: Tensor, by: int, piece: DiffusionBatch) -> DiffusionBatch | None:
    """Moves a step by some places of the schedule, with the same latents; None if there is none."""
    steps = piece.step_indices + by
    if not 0 <= int(steps.min()) <= int(steps.max()) < len(timesteps):
        return None
    return piece.replace(step_indices=steps, all_timesteps=timesteps[steps])


def round_states(batch: DiffusionBatch, dtype: torch.dtype, first: int) -> DiffusionBatch:
    """Rounds recorded states, from the one with index `first` on; 0 is where step 1 starts."""
    states = batch.all_latents
    rounded = torch.cat([states[:, :first], states[:, first:].to(dtype).float()], 1)
    return batch.replace(all_latents=rounded)


def scaled(state: State, factor: float) -> dict[str, Tensor]:
    """Returns a LoRA whose effect is `factor` times as large."""
    return {
        name: tensor * factor if ".lora_B." in name else tensor for name, tensor in state.items()
    }


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the mean |difference| where `ours` is a number; inf if it is a number nowhere."""
    known = ~ours.isnan()
    return (ours - theirs)[known].double().abs().mean().item() if known.any() else math.inf

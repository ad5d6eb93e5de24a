"""Known faults of a rollout, each as something that can be done to recorded steps on our side.

A fault is believed when the engine's log-probs come out of a replay that has it. Legend: B samples,
T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, concat
from flowgrpo_rc.calibration.measure import Copy, RecordedRollout, with_guidance
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.core.transition import log_prob
from flowgrpo_rc.core.transition import sample as draw
from flowgrpo_rc.policies.encode_prompts import encode_unique

# One recorded step -> the step with a fault; None where there is no such step.
Change = Callable[[DiffusionBatch], DiffusionBatch | None]
State = Mapping[str, Tensor]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHIFTS = [2 ** (k / 2) for k in range(-4, 5)]  # of the schedule, relative to the configured one
SCALES = [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0]  # of the guidance, likewise
EMBEDDED = (1.0, 2.5, 3.5, 5.0, 7.0)  # usual guidance of transformers that take it as an input
TYPICAL_SHIFT, TYPICAL_SCALE = 1.1, 1.01  # tried where there is no mismatch to explain
GOLDEN = (math.sqrt(5) - 1) / 2
TOLERANCE = 1e-4  # of a fitted size, relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A fault of the family `cause`, and how far [mean |difference|] a replay with it stays from
    the engine.
    """

    cause: str
    fault: str
    residual: float


class Lora(NamedTuple):
    """The trainer's LoRA tensors: at the start, before the last movement, and those that the engine
    was given last.
    """

    start: State
    before: State
    current: State


class Replay:
    """Replays of a few recorded steps by a copy of the trainer's network in the engine's precision.

    lora_scale: alpha / rank. log_probs [B, T]: without any fault.
    """

    def __init__(self, copy: Copy, rollout: RecordedRollout, lora: Lora, lora_scale: float) -> None:
        self._copy = copy
        self._rollout = rollout
        self._lora = lora
        self._lora_scale = lora_scale
        self.model = copy.model
        self._batch = rollout.batch
        self._spec = rollout.batch.spec
        self._timesteps = self.model.schedule(self._spec).timesteps
        self.log_probs = self._changed(lambda piece: piece)

    def trials(self) -> Iterator[Trial]:
        """Every fault that has no size."""
        yield from self._rounded_timesteps()
        yield from self._rounded_latents()
        yield from self._window()
        yield from self._weights()

    def sized_trials(self, *, fitted: bool) -> Iterator[Trial]:
        """Every fault that has a size: with `fitted` that which is nearest to the record, otherwise
        a typical one.
        """
        yield self._schedule(fitted)
        yield self._guidance(self.model.cfg_key, fitted)
        if self.model.embeds_guidance:
            yield self._guidance("guidance_scale", fitted)

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
        """Rounding what a step starts from can be replayed. What was rounded after its log-prob was
        taken is gone: then the pattern of the mismatch is compared with that of steps of our own,
        made from the same noise."""
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
                pattern = (
                    self._copy.log_probs(round_states(again, dtype, first))
                    - again.rollout_log_probs
                )
                yield Trial(cause="latents", fault=fault, residual=distance(pattern, observed))

    def _guidance(self, key: str, fitted: bool) -> Trial:
        """Of classifier-free guidance, or of that which the transformer takes as an input."""
        batch = self._batch
        classifier_free = key == self.model.cfg_key
        asked = self.model.cfg_scale(self._spec) if classifier_free else self._spec.guidance_scale
        negative = batch.negative
        if negative is None and classifier_free:
            texts = [prompt.negative_text for prompt in self._rollout.request.prompts.prompts]
            negative = encode_unique(self.model, texts, self._spec.max_sequence_length)

        def residual(factor: float) -> float:
            spec = with_guidance(batch.spec, key, asked * factor)
            return self._residual(lambda piece: piece.replace(spec=spec, negative=negative))

        usual = () if classifier_free else (TYPICAL_SCALE, *(scale / asked for scale in EMBEDDED))
        factor = fit(residual, sorted({*SCALES, *usual})) if fitted else TYPICAL_SCALE
        fault = f"{key} {asked * factor:.4g} in place of {asked:g}"
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
        """Log-probs [B, T] with a change of every step; nan where it leads to none."""
        columns = []
        for t in range(self._batch.num_steps):
            piece = change(self._batch.step(t))
            recorded = self._rollout.recorded[:, t : t + 1]
            columns.append(
                torch.full_like(recorded, math.nan)
                if piece is None
                else self._copy.log_probs(piece)
            )
        return torch.cat(columns, 1)

    def _residual(self, change: Change) -> float:
        return distance(self._changed(change), self._rollout.recorded)

    def _sampled_again(self) -> DiffusionBatch:
        """What the copy samples from the same seeds."""
        parts = []
        for rows in self._rows():
            seeds = rows.seed.tolist()
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
            parts.append(rows.replace(all_latents=states, rollout_log_probs=log_probs))
        return concat(parts)

    @torch.no_grad()
    def _stepped_again(self) -> DiffusionBatch:
        """Every recorded step, taken again by the copy with the same noise."""
        convention = self._batch.spec.log_prob_convention
        parts = []
        for rows in self._rows():
            states = [rows.all_latents[:, 0]]
            log_probs = []
            for t in range(rows.num_steps):
                step = self._copy.policy.evaluate(rows.step(t)).transition
                states.append(draw(step, noise(rows, int(rows.step_indices[0, t]))))
                log_probs.append(log_prob(step, states[-1], convention=convention))
            parts.append(
                rows.replace(
                    all_latents=torch.stack(states, 1), rollout_log_probs=torch.stack(log_probs, 1)
                )
            )
        return concat(parts)

    def _rows(self) -> Iterator[DiffusionBatch]:
        """The recorded samples as they were sampled together."""
        for start in range(0, len(self._batch), self._copy.rows):
            yield self._batch.rows(start, start + self._copy.rows)


def noise(batch: DiffusionBatch, step: int) -> Tensor:
    """What the samples of a batch [B, ...] drew at a step of the schedule."""
    return normal(batch.all_latents.shape[2:], batch.seed.tolist(), "step", step).to(
        batch.all_latents.device
    )


def shift_schedule(piece: DiffusionBatch, timesteps: Tensor, shift: float) -> DiffusionBatch:
    """A step on the schedule shift x sigma / (1 + (shift - 1) x sigma), timesteps [S] in
    proportion.
    """
    sigmas = shift * piece.sigmas / (1 + (shift - 1) * piece.sigmas)
    moved = timesteps * (sigmas / piece.sigmas)[:-1]
    return piece.replace(sigmas=sigmas, all_timesteps=moved[piece.step_indices])


def round_timesteps(piece: DiffusionBatch, dtype: torch.dtype) -> DiffusionBatch:
    return piece.replace(all_timesteps=piece.all_timesteps.to(dtype).float())


def round_start(piece: DiffusionBatch, dtype: torch.dtype) -> DiffusionBatch:
    """A step from rounded latents to what is recorded."""
    start, end = piece.all_latents.unbind(1)
    return piece.replace(all_latents=torch.stack([start.to(dtype).float(), end], 1))


def round_states(batch: DiffusionBatch, dtype: torch.dtype, first: int) -> DiffusionBatch:
    """The states from the one at `first` on, rounded."""
    states = batch.all_latents
    rounded = torch.cat([states[:, :first], states[:, first:].to(dtype).float()], 1)
    return batch.replace(all_latents=rounded)


def move_step(piece: DiffusionBatch, timesteps: Tensor, by: int) -> DiffusionBatch | None:
    """The same latents at another step of the schedule."""
    steps = piece.step_indices + by
    if not 0 <= int(steps.min()) <= int(steps.max()) < len(timesteps):
        return None
    return piece.replace(step_indices=steps, all_timesteps=timesteps[steps])


def scaled(state: State, factor: float) -> dict[str, Tensor]:
    """A LoRA of another strength."""
    return {
        name: tensor * factor if ".lora_B." in name else tensor for name, tensor in state.items()
    }


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean |difference| where ours is a number; inf where it is none anywhere."""
    known = ~ours.isnan()
    return (ours - theirs)[known].double().abs().mean().item() if known.any() else math.inf


def fit(residual: Callable[[float], float], grid: Sequence[float]) -> float:
    """The positive number with the least residual: golden-section search about the best of an
    ascending grid.

    A shorter number is taken where it is as good, since settings are short numbers, and that of the
    grid where the residual has several valleys and the search ends in a shallower one.
    """
    best = min(range(len(grid)), key=lambda index: residual(grid[index]))
    low = math.log(grid[max(best - 1, 0)])
    high = math.log(grid[min(best + 1, len(grid) - 1)])
    at = lru_cache(maxsize=None)(lambda place: residual(math.exp(place)))
    while high - low > TOLERANCE:
        left = high - GOLDEN * (high - low)
        right = low + GOLDEN * (high - low)
        nearer = at(round(left, 9)) < at(
            round(right, 9)
        )  # one of the two is known from the round before
        low, high = (low, right) if nearer else (left, high)
    found = math.exp((low + high) / 2)
    return min(
        [*(float(f"{found:.{digits}g}") for digits in (1, 2, 3, 4)), found, grid[best]],
        key=residual,
    )

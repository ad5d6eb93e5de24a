"""The fault, if any, that explains the mismatch: a replay that has it comes closer to the record.

`record` finds what a record shows by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo_rc.calibration.faults import Replay, Trial
from flowgrpo_rc.calibration.measure import Mismatch
from flowgrpo_rc.calibration.noise import NoiseReport

# A replay explains a mismatch that it makes this many times smaller.
CLEAR = 10.0
# A mismatch above this multiple of what the engine's precision explains is a fault.
BEYOND = 3.0
# A replay whose residual is below this multiple of it is as near as the precision allows.
AS_NEAR = 1.5
# An engine whose mismatch is so many times nearer to that of plain weights has no quantized ones.
NEARER = 2.0
# Relative difference of fp32 log-probs whose sums are taken in another order.
RESOLUTION = 8 * torch.finfo(torch.float32).eps

REMEDIES = {
    "schedule": "compare the scheduler's shift and the number of steps of the two sides",
    "timestep": "hand the transformer fp32 timesteps",
    "latents": "keep and record the latents in fp32 between the steps",
    "means": "record the means that the steps were drawn about, in fp32",
    "guidance": "compare the guidance scale and its formula on the two sides",
    "window": "compare the indices of the recorded steps with those that were stochastic",
    "lora": "see whether the engine binds every LoRA tensor, with alpha / rank folded in",
    "weights": "see that the engine takes over the weights of every sync before it samples",
    "prompt": "hand every prompt to the text encoder as it is, whitespace included",
    "noise": "draw standard normal noise, independent for every sample and step",
    "quantization": "see whether the engine really loads quantized weights",
    "precision": "see in which precision the engine really computes (autocast, loading)",
    "settings": "the engine must sample with the settings that it is asked for",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The explanation of the mismatch of a few recorded steps.

    All sizes are means of |difference of log-probs|.
    """

    mismatch: float  # between trainer and engine
    copy_mismatch: float  # between trainer and its copy in the engine's precision
    as_recorded: float  # between that copy and the engine: what the precision leaves unexplained
    trials: Sequence[Trial]  # replays with a fault each
    found: Sequence[tuple[str, str]]  # cause and sentence: what record, engine and noise show
    explanation: Trial | None  # the trial that explains the mismatch
    similar: str | None  # a precision in which a copy differs as much as the engine
    healthy: bool  # whether there is nothing to explain
    notes: Sequence[str] = ()  # what is no fault and still worth knowing

    @property
    def cause(self) -> str | None:
        """The likely cause, a key of `REMEDIES`; None if no fault is known."""
        if self.explanation is not None:
            return self.explanation.cause
        return self.found[0][0] if self.found else None

    @property
    def doubt(self) -> str | None:
        """The reason not to take the mismatch for noise; None if there is none."""
        if self.cause is not None:
            return f"there is a fault to be mended ({self.cause})"
        if self.healthy:
            return None
        return "it is more than the precision explains, and no known fault explains it"

    def sentence(self) -> str:
        """Returns the verdict in words."""
        clauses = [sentence for _, sentence in self.found]
        if self.explanation is not None:
            trial = self.explanation
            clauses.append(
                f"likely cause: {trial.cause}: {trial.fault}. Replayed so, the mismatch falls from "
                f"{self.as_recorded:.1e} to {trial.residual:.1g}"
            )
        elif not self.healthy:
            clauses.append(
                f"no known fault explains the mismatch: {self.mismatch:.1e}, where the precision "
                f"explains {self.copy_mismatch:.1e}"
            )
            if self.similar is not None:
                same = f"it is as large as that of {self.similar}"
                clauses.append(f"{same}: see whether the engine computes in it")
        elif not self.found:
            clauses.append(
                f"no fault: the mismatch of {self.mismatch:.1e} is that of the precision "
                f"({self.copy_mismatch:.1e})"
            )
        if self.cause is not None:
            clauses.append(REMEDIES[self.cause])
        return "; ".join([*clauses, *self.notes])


def diagnose(
    replay: Replay,
    engine: Mismatch,
    copies: Sequence[Mismatch],
    found: Sequence[tuple[str, str]],
    noise: NoiseReport,
    whitespace: Replay | None = None,
) -> Diagnosis:
    """Explains the mismatch of a few recorded steps.

    `copies` are those of the trainer and its copies, the one in the engine's precision first;
    `found` comes from `record`; `whitespace` replays a prompt with whitespace planted in it.
    """
    mismatch, copy_mismatch = engine.mean(), copies[0].mean()
    as_recorded = replay.as_recorded
    resolution = RESOLUTION * replay.recorded.abs().mean().item()
    allowed = max(copy_mismatch, resolution)
    enough = _enough(as_recorded, allowed, resolution)
    plain = _precisions(engine, copies[1:])
    trials = [*plain, *replay.trials()]
    # Not `>`, which would be False for nan.
    open_question = not as_recorded <= resolution
    fitted = open_question and all(trial.residual > enough for trial in trials)
    trials += replay.sized_trials(fitted=fitted)
    best = _least(trials)
    explained = open_question and best.residual <= enough
    healthy = not explained and as_recorded <= BEYOND * allowed
    found = list(found)
    if not explained:
        found += _of_prompts(whitespace, allowed, resolution) if whitespace else []
        wrong = [*noise.wrong, *(noise.moments if healthy else ())]
        found += [("noise", sentence) for sentence in wrong]
        nearest = _least(plain)
        # The engine's kernels may be other ones than the copies', so that no copy is near.
        if "+" in engine.precision and nearest.residual < as_recorded / NEARER:
            sentence = (
                f"{nearest.fault}: so the engine differs by {nearest.residual:.1e}, and by "
                f"{as_recorded:.1e} from quantized weights"
            )
            found.append(("quantization", sentence))
    similar = [
        copy.precision for copy in copies if 0.5 < mismatch / max(copy.mean(), resolution) < 2
    ]
    return Diagnosis(
        mismatch=mismatch,
        copy_mismatch=copy_mismatch,
        as_recorded=as_recorded,
        trials=trials,
        found=found,
        explanation=best if explained else None,
        similar=similar[0] if similar else None,
        healthy=healthy,
        notes=noise.notes,
    )


def _least(trials: Sequence[Trial]) -> Trial:
    """Returns the first of the trials that come nearest to the engine."""
    # nan is no distance, and min would keep one that comes first.
    return min(trials, key=lambda one: one.residual if math.isfinite(one.residual) else math.inf)


def _enough(as_recorded: float, allowed: float, resolution: float) -> float:
    """Returns how much of a mismatch a replay may leave to explain it.

    `allowed` is what the precision explains, `resolution` the rounding of fp32 log-probs.
    """
    enough = max(as_recorded / CLEAR, resolution)
    return max(enough, AS_NEAR * allowed) if as_recorded > BEYOND * allowed else enough


def _precisions(engine: Mismatch, copies: Sequence[Mismatch]) -> list[Trial]:
    """Compares the engine with the trainer, and with copies in other precisions than it says."""
    _, _, quantization = engine.precision.partition("+")
    cause = "quantization" if quantization else "precision"
    prefix = f"{quantization} not applied: " if quantization else ""
    trials = [Trial(cause, f"{prefix}computed as the trainer does", engine.mean())]
    for copy in copies:
        residual = (engine.differences - copy.differences).abs().mean().item()
        trials.append(Trial(cause, f"{prefix}computed in {copy.precision}", residual))
    return trials


def _of_prompts(whitespace: Replay, allowed: float, resolution: float) -> list[tuple[str, str]]:
    """Says what was done to the prompt with planted whitespace, as (cause, sentence)."""
    as_recorded = whitespace.as_recorded
    if as_recorded <= resolution:
        return []
    best = _least(list(whitespace.prompt_trials()))
    if not best.residual <= _enough(as_recorded, allowed, resolution):
        return []
    sentence = (
        f"{best.fault}, which shows in a prompt with planted whitespace: replayed so, its "
        f"mismatch falls from {as_recorded:.1e} to {best.residual:.1g}"
    )
    return [("prompt", sentence)]

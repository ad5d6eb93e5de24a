"""The fault, if any, that explains the mismatch: a replay that has it comes closer to the record.

`record` finds what a record shows by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo_rc.calibration.causes import Symptom, causes
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The explanation of the mismatch of a few recorded steps.

    All sizes are means of |difference of log-probs|.
    """

    mismatch: float  # between trainer and engine
    copy_mismatch: float  # between trainer and its copy in the engine's precision
    as_recorded: float  # between that copy and the engine: what the precision leaves unexplained
    trials: Sequence[Trial]  # replays with a fault each
    symptoms: Sequence[Symptom]  # what record, engine and noise show
    explanation: Trial | None  # the trial that explains the mismatch
    similar: str | None  # a precision in which a copy differs as much as the engine
    healthy: bool  # whether there is nothing to explain
    notes: Sequence[str] = ()  # what is no fault and still worth knowing

    @property
    def cause(self) -> str | None:
        """The likely cause, a name of the table of causes; None if no fault is known."""
        if self.explanation is not None:
            return self.explanation.cause
        return self.symptoms[0].cause if self.symptoms else None

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
        clauses = [symptom.evidence for symptom in self.symptoms]
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
        elif not self.symptoms:
            clauses.append(
                f"no fault: the mismatch of {self.mismatch:.1e} is that of the precision "
                f"({self.copy_mismatch:.1e})"
            )
        if self.cause is not None:
            clauses.append(causes()[self.cause].mend)
        return "; ".join([*clauses, *self.notes])


def diagnose(
    replay: Replay,
    engine: Mismatch,
    copies: Sequence[Mismatch],
    symptoms: Sequence[Symptom],
    noise: NoiseReport,
    whitespace: Replay | None = None,
) -> Diagnosis:
    """Explains the mismatch of a few recorded steps.

    `copies` are those of the trainer and its copies, the one in the engine's precision first;
    `symptoms` come from `record`; `whitespace` replays a prompt with whitespace planted in it.
    """
    mismatch = engine.mean()
    as_recorded = replay.as_recorded
    resolution = RESOLUTION * replay.recorded.abs().mean().item()
    allowed = max(copies[0].mean(), resolution)
    enough = _enough(as_recorded, allowed, resolution)
    precision_trials = _precision_trials(engine, copies[1:])
    trials = [*precision_trials, *replay.trials()]
    # Not `>`, which would be False for nan.
    open_question = not as_recorded <= resolution
    fitted = open_question and all(trial.residual > enough for trial in trials)
    trials += replay.sized_trials(fitted=fitted)
    best = _nearest(trials)
    explained = open_question and best.residual <= enough
    healthy = not explained and as_recorded <= BEYOND * allowed
    symptoms = list(symptoms)
    if not explained:
        symptoms += _of_prompts(whitespace, allowed, resolution) if whitespace else []
        symptoms += [*noise.wrong, *(noise.moments if healthy else ())]
        nearest = _nearest(precision_trials)
        # The engine's kernels may be other ones than the copies', so that no copy is near.
        if "+" in engine.precision and nearest.residual < as_recorded / NEARER:
            evidence = (
                f"{nearest.fault}: so the engine differs by {nearest.residual:.1e}, and by "
                f"{as_recorded:.1e} from quantized weights"
            )
            symptoms.append(Symptom("quantization", evidence))
    ratios = {copy.precision: mismatch / max(copy.mean(), resolution) for copy in copies}
    return Diagnosis(
        mismatch=mismatch,
        copy_mismatch=copies[0].mean(),
        as_recorded=as_recorded,
        trials=trials,
        symptoms=symptoms,
        explanation=best if explained else None,
        similar=next((name for name, ratio in ratios.items() if 0.5 < ratio < 2), None),
        healthy=healthy,
        notes=noise.notes,
    )


def _nearest(trials: Sequence[Trial]) -> Trial:
    """Returns the first of the trials that come nearest to the engine."""
    # nan is no distance, and min would keep one that comes first.
    return min(trials, key=lambda trial: (not math.isfinite(trial.residual), trial.residual))


def _enough(as_recorded: float, allowed: float, resolution: float) -> float:
    """Returns how much of a mismatch a replay may leave to explain it.

    `allowed` is what the precision explains, `resolution` the rounding of fp32 log-probs.
    """
    enough = max(as_recorded / CLEAR, resolution)
    return max(enough, AS_NEAR * allowed) if as_recorded > BEYOND * allowed else enough


def _precision_trials(engine: Mismatch, copies: Sequence[Mismatch]) -> list[Trial]:
    """Compares the engine with the trainer, and with copies in other precisions than it says."""
    _, _, quantization = engine.precision.partition("+")
    cause = "quantization" if quantization else "precision"
    prefix = f"{quantization} not applied: " if quantization else ""
    trials = [Trial(cause, f"{prefix}computed as the trainer does", engine.mean())]
    for copy in copies:
        residual = (engine.differences - copy.differences).abs().mean().item()
        trials.append(Trial(cause, f"{prefix}computed in {copy.precision}", residual))
    return trials


def _of_prompts(whitespace: Replay, allowed: float, resolution: float) -> list[Symptom]:
    """Says what was done to the prompt with planted whitespace."""
    as_recorded = whitespace.as_recorded
    if as_recorded <= resolution:
        return []
    best = _nearest(list(whitespace.prompt_trials()))
    if not best.residual <= _enough(as_recorded, allowed, resolution):
        return []
    evidence = (
        f"{best.fault}, which shows in a prompt with planted whitespace: replayed so, its "
        f"mismatch falls from {as_recorded:.1e} to {best.residual:.1g}"
    )
    return [Symptom("prompt", evidence)]

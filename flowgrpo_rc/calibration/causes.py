"""The fault, if any, that explains the mismatch.

The record itself shows some faults; others show when a replay that has them comes closer to the
record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo_rc.calibration.faults import HALF, Replay, Trial, distance
from flowgrpo_rc.calibration.measure import Mismatch, RecordedRollout
from flowgrpo_rc.models.base import FlowModel

# A replay explains a mismatch that it makes this many times smaller.
CLEAR = 10.0
# A mismatch above this multiple of what the engine's precision explains is a fault.
BEYOND = 3.0
# A replay whose residual is below this multiple of it is as near as the precision allows.
AS_NEAR = 1.5
# Relative difference of fp32 log-probs whose sums are taken in another order.
RESOLUTION = 8 * torch.finfo(torch.float32).eps

REMEDIES = {
    "schedule": "compare the scheduler's shift and the number of steps of the two sides",
    "timestep": "hand the transformer fp32 timesteps",
    "latents": "keep and record the latents in fp32 between the steps",
    "guidance": "compare the guidance scale and its formula on the two sides",
    "window": "compare the indices of the recorded steps with those that were stochastic",
    "lora": "see whether the engine binds every LoRA tensor, with alpha / rank folded in",
    "weights": "see that the engine takes over the weights of every sync before it samples",
    "precision": "see in which precision the engine really computes (autocast, loading)",
    "settings": "the engine must sample with the settings that it is asked for",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The explanation of the mismatch of a few recorded steps.

    All sizes are means of |difference of log-probs|.

    Attributes:
      mismatch: between trainer and engine.
      copy_mismatch: between trainer and its copy in the engine's precision.
      as_recorded: between that copy and the engine: what the precision leaves unexplained.
      resolution: rounding of fp32 log-probs.
      trials: replays with a fault each.
      found: what the record itself shows, (cause, sentence).
      explanation: the trial that explains the mismatch; None if none does.
      similar: a precision in which a copy differs as much as the engine; None if there is none.
      healthy: True if there is nothing to explain.
    """

    mismatch: float
    copy_mismatch: float
    as_recorded: float
    resolution: float
    trials: Sequence[Trial]
    found: Sequence[tuple[str, str]]
    explanation: Trial | None
    similar: str | None
    healthy: bool

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
                clauses.append(
                    f"it is as large as that of {self.similar}: see whether the engine computes in "
                    "it"
                )
        elif not self.found:
            clauses.append(
                f"no fault: the mismatch of {self.mismatch:.1e} is that of the precision "
                f"({self.copy_mismatch:.1e})"
            )
        if self.cause is not None:
            clauses.append(REMEDIES[self.cause])
        return "; ".join(clauses)


def diagnose(
    rollout: RecordedRollout,
    replay: Replay,
    engine: Mismatch,
    copies: Sequence[Mismatch],
    found: Sequence[tuple[str, str]],
) -> Diagnosis:
    """Explains the mismatch of a few recorded steps.

    Args:
      rollout: the recorded steps.
      replay: replays them with faults.
      engine: the mismatch of trainer and engine.
      copies: the mismatch of the trainer and its copies in several precisions; the copy in the
        engine's precision comes first.
      found: from `check_record`.
    """
    recorded = rollout.recorded
    mismatch = size(engine)
    copy_mismatch = size(copies[0])
    as_recorded = distance(replay.log_probs, recorded)
    resolution = RESOLUTION * recorded.abs().mean().item()
    allowed = max(copy_mismatch, resolution)
    # A fault explains the mismatch if its replay leaves at most this much of it.
    enough = max(as_recorded / CLEAR, resolution)
    if as_recorded > BEYOND * allowed:
        enough = max(enough, AS_NEAR * allowed)
    trials = [Trial(cause="precision", fault="computed as the trainer does", residual=mismatch)]
    for copy in copies[1:]:
        residual = (engine.differences - copy.differences).abs().mean().item()
        trials.append(
            Trial(cause="precision", fault=f"computed in {copy.precision}", residual=residual)
        )
    trials += replay.trials()
    # Not `>`, which would be False for nan.
    open_question = not as_recorded <= resolution
    trials += replay.sized_trials(
        fitted=open_question and all(trial.residual > enough for trial in trials)
    )
    best = min(
        trials, key=lambda trial: trial.residual if math.isfinite(trial.residual) else math.inf
    )
    explained = open_question and best.residual <= enough
    similar = (
        copy.precision for copy in copies if 0.5 < mismatch / max(size(copy), resolution) < 2
    )
    return Diagnosis(
        mismatch=mismatch,
        copy_mismatch=copy_mismatch,
        as_recorded=as_recorded,
        resolution=resolution,
        trials=trials,
        found=found,
        explanation=best if explained else None,
        similar=next(similar, None),
        healthy=not explained and as_recorded <= BEYOND * allowed,
    )


def size(mismatch: Mismatch) -> float:
    """Returns the mean |difference|."""
    return mismatch.differences.abs().mean().item()


def check_record(
    rollout: RecordedRollout, model: FlowModel, *, version: int, other_tensors: int
) -> list[tuple[str, str]]:
    """Checks a record apart from its log-probs.

    Args:
      rollout: the record.
      model: the trainer's model.
      version: version of the weights that the engine was given last.
      other_tensors: number of tensors in the engine's LoRA that are not those it was given.

    Returns:
      Each fault as (cause, sentence).
    """
    batch = rollout.batch
    request = rollout.request
    found = []
    schedule = model.schedule(request.spec)
    steps = batch.step_indices
    different = request.spec.differences(batch.spec)
    if different:
        found.append(
            ("settings", f"the engine sampled with other settings: {'; '.join(different)}")
        )
    # torch.equal is also False for tensors of different shapes.
    if not torch.equal(batch.sigmas, schedule.sigmas):
        found.append(
            ("schedule", "the engine recorded other sigmas than the model's scheduler has")
        )
    elif not torch.equal(steps, request.window.to(steps)):
        found.append(("window", "the recorded steps are not those that were asked for"))
    elif not torch.equal(batch.all_timesteps, schedule.timesteps[steps]):
        found.append(("timestep", "the recorded timesteps are not those of the schedule"))
    results = batch.all_latents[:, 1:]
    for name, dtype in HALF.items():
        if torch.equal(results, results.to(dtype).float()):
            found.append(("latents", f"every recorded latent is a number of {name}"))
            break
    versions = sorted(set(batch.policy_version.tolist()))
    if versions != [version]:
        found.append(
            ("weights", f"the engine sampled with the weights of version {versions}, not {version}")
        )
    elif other_tensors:
        sentence = f"{other_tensors} tensors of the engine's LoRA are not those that it was given"
        found.append(("weights", sentence))
    return found

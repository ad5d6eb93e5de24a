"""Which fault, if any, explains the mismatch: by what the record says, and by replays that have the
fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo_rc.calibration.faults import HALF, Replay, Trial, distance
from flowgrpo_rc.calibration.measure import Mismatch, RecordedRollout
from flowgrpo_rc.models.base import FlowModel

CLEAR = 10.0  # a replay explains a mismatch that it makes so many times smaller
BEYOND = 3.0  # so many times what the engine's precision explains is more than that
AT_FLOOR = 1.5  # a replay is as near as the precision allows
RESOLUTION = (
    8 * torch.finfo(torch.float32).eps
)  # of fp32 log-probs that are sums in another order, relative

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
    """mismatch: mean |trainer - engine|; floor: mean |trainer - its copy in the engine's
    precision|; as_recorded: mean |copy - engine|, what the precision leaves open; resolution: of
    fp32 log-probs.

    trials: replays with each fault; found: what the record itself shows, (cause, sentence);
    explanation: the trial that explains the mismatch, if one does; similar: a precision in which a
    copy differs as much; healthy: whether there is nothing to explain.
    """

    mismatch: float
    floor: float
    as_recorded: float
    resolution: float
    trials: Sequence[Trial]
    found: Sequence[tuple[str, str]]
    explanation: Trial | None
    similar: str | None
    healthy: bool

    @property
    def cause(self) -> str | None:
        if self.explanation is not None:
            return self.explanation.cause
        return self.found[0][0] if self.found else None

    @property
    def doubt(self) -> str | None:
        """Why the mismatch is not to be taken for noise; None where it may be."""
        if self.cause is not None:
            return f"there is a fault to be mended ({self.cause})"
        return (
            None
            if self.healthy
            else "it is more than the precision explains, and no known fault explains it"
        )

    def sentence(self) -> str:
        """The verdict in words."""
        parts = [sentence for _, sentence in self.found]
        if self.explanation is not None:
            there = self.explanation
            parts.append(
                f"likely cause: {there.cause}: {there.fault}. Replayed so, the mismatch falls from "
                f"{self.as_recorded:.1e} to {there.residual:.1g}"
            )
        elif not self.healthy:
            parts.append(
                f"no known fault explains the mismatch: {self.mismatch:.1e}, where the precision "
                "explains "
                f"{self.floor:.1e}"
            )
            if self.similar is not None:
                parts.append(
                    f"it is as large as that of {self.similar}: see whether the engine computes "
                    "in it"
                )
        elif not self.found:
            parts.append(
                f"no fault: the mismatch of {self.mismatch:.1e} is that of the precision "
                f"({self.floor:.1e})"
            )
        if self.cause is not None:
            parts.append(REMEDIES[self.cause])
        return "; ".join(parts)


def diagnose(
    rollout: RecordedRollout,
    replay: Replay,
    engine: Mismatch,
    copies: Sequence[Mismatch],
    found: Sequence[tuple[str, str]],
) -> Diagnosis:
    """Explain the mismatch of a few recorded steps.

    engine: of the trainer and the engine on them; copies: of the trainer and its copies in several
    precisions, that of the engine first; found: by `check_record`.
    """
    recorded = rollout.recorded
    mismatch = size(engine)
    floor = size(copies[0])
    as_recorded = distance(replay.log_probs, recorded)
    resolution = RESOLUTION * recorded.abs().mean().item()
    allowed = max(floor, resolution)
    enough = max(as_recorded / CLEAR, resolution)
    if as_recorded > BEYOND * allowed:
        enough = max(enough, AT_FLOOR * allowed)
    trials = [Trial(cause="precision", fault="computed as the trainer does", residual=mismatch)]
    for copy in copies[1:]:
        residual = (engine.differences - copy.differences).abs().mean().item()
        trials.append(
            Trial(cause="precision", fault=f"computed in {copy.precision}", residual=residual)
        )
    trials += replay.trials()
    open_question = not as_recorded <= resolution
    trials += replay.sized_trials(
        fitted=open_question and all(trial.residual > enough for trial in trials)
    )
    best = min(
        trials, key=lambda trial: trial.residual if math.isfinite(trial.residual) else math.inf
    )
    explained = open_question and best.residual <= enough
    return Diagnosis(
        mismatch=mismatch,
        floor=floor,
        as_recorded=as_recorded,
        resolution=resolution,
        trials=trials,
        found=found,
        explanation=best if explained else None,
        similar=next(
            (c.precision for c in copies if 0.5 < mismatch / max(size(c), resolution) < 2), None
        ),
        healthy=not explained and as_recorded <= BEYOND * allowed,
    )


def size(mismatch: Mismatch) -> float:
    return mismatch.differences.abs().mean().item()


def check_record(
    rollout: RecordedRollout, model: FlowModel, *, version: int, other_tensors: int
) -> list[tuple[str, str]]:
    """What is wrong with a record whatever its log-probs are: (cause, sentence).

    version: of the weights that the engine was given last; other_tensors: of its LoRA, how many are
        not those.
    """
    batch = rollout.batch
    request = rollout.request
    found = []
    schedule = model.schedule(request.spec)
    steps = batch.step_indices
    results = batch.all_latents[:, 1:]
    different = request.spec.differences(batch.spec)
    if different:
        found.append(
            ("settings", f"the engine sampled with other settings: {'; '.join(different)}")
        )
    if batch.sigmas.shape != schedule.sigmas.shape or not torch.equal(
        batch.sigmas, schedule.sigmas
    ):
        found.append(
            ("schedule", "the engine recorded other sigmas than the model's scheduler has")
        )
    elif not torch.equal(steps, request.window.to(steps)):
        found.append(("window", "the recorded steps are not those that were asked for"))
    elif not torch.equal(batch.all_timesteps, schedule.timesteps[steps]):
        found.append(("timestep", "the recorded timesteps are not those of the schedule"))
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
        found.append(
            (
                "weights",
                f"{other_tensors} tensors of the engine's LoRA are not those that it was given",
            )
        )
    return found

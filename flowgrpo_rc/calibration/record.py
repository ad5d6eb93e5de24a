"""Faults that a record, or the engine itself, shows without a replay; each as (cause, sentence)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, Spec
from flowgrpo_rc.calibration.faults import HALF, dropped, other_prompts
from flowgrpo_rc.calibration.measure import RecordedRollout
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.conditioning import conditioning_error
from flowgrpo_rc.monitoring.health_rules import OTHER_PROMPT
from flowgrpo_rc.monitoring.noise import mean_squares, rollout_noise
from flowgrpo_rc.rollout.engine import RolloutEngine, other_tensors

# A mean square of noise is about 1, and a sum of fp32 numbers in some order.
MEANS_APART = 2e-5


def check_record(
    rollout: RecordedRollout, model: FlowModel, *, version: int
) -> list[tuple[str, str]]:
    """Checks a record apart from its log-probs; the engine was given weights of `version` last."""
    batch, request = rollout.batch, rollout.request
    schedule, steps = model.walked_schedule(request.spec), batch.step_indices
    found = []
    different = request.spec.differences(batch.spec)
    if different:
        sentence = f"the engine sampled with other settings: {'; '.join(different)}"
        found.append(("settings", sentence))
    scale = model.cfg_scale(request.spec)
    if batch.negative is None and scale > 1:
        fault = dropped(model.cfg_key, model.cfg_value(1.0), model.cfg_value(scale))
        found.append(("guidance", f"{fault}, since no negative prompt is recorded"))
    # torch.equal is also False for tensors of different shapes.
    if not torch.equal(batch.sigmas, schedule.sigmas):
        sentence = "the engine recorded other sigmas than the model's scheduler has"
        found.append(("schedule", sentence))
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
        sentence = f"the engine sampled with the weights of version {versions}, not {version}"
        found.append(("weights", sentence))
    return found


def check_means(batch: DiffusionBatch) -> list[tuple[str, str]]:
    """Checks that the recorded means, if any, fit the recorded log-probs.

    A centered log-ratio rests on them, and log-probs that agree do not show that they are wrong.
    """
    if batch.prev_sample_mean is None:
        return []
    noise, _ = rollout_noise(batch)
    apart = (noise.double().square().mean(2) - mean_squares(batch)).abs().max().item()
    if apart <= MEANS_APART:
        return []
    sentence = f"the noise of steps has one size by their means, another by log-probs ({apart:.1e})"
    return [("means", sentence)]


def check_prompts(rollout: RecordedRollout, model: FlowModel) -> list[tuple[str, str]]:
    """Compares recorded conditioning with what the trainer's encoders make of the prompts.

    An engine that encodes itself may record that of another text, which makes no mismatch.
    """

    def differs(others: Sequence[Prompt]) -> bool:
        return bool(conditioning_error(model, rollout.batch, others).max() > OTHER_PROMPT)

    if not differs(rollout.prompts):
        return []
    unknown = "changed in a way that is not known here, or encoded by another text encoder"
    names = (name for name, others in other_prompts(rollout.prompts) if not differs(others))
    return [("prompt", f"the engine recorded prompts {next(names, unknown)}")]


def check_engine(
    engine: RolloutEngine[Any], pushed: Mapping[str, Tensor], spec: Spec
) -> list[tuple[str, str]]:
    """Reads back what an engine holds, where it shows it, of the LoRA that it was given."""
    found = []
    plain = engine.plain_layers()
    _, _, quantization = spec.dtype.partition("+")
    if quantization and plain:
        sentence = f"{quantization} is not applied: {plain} layers hold plain weights"
        found.append(("quantization", sentence))
    held = engine.held_weights()
    if held is None:
        return found
    bound = held.keys() & pushed.keys()
    unbound = len(pushed) - len(bound)
    if not bound:
        sentence = f"the LoRA is bound to no module: none of its {len(pushed)} tensors is held"
        found.append(("lora", sentence))
    elif unbound:
        found.append(("lora", f"{unbound} of the LoRA's {len(pushed)} tensors are bound nowhere"))
    ours, theirs = ({name: state[name] for name in bound} for state in (pushed, held))
    others = other_tensors(theirs, ours)
    if others:
        sentence = f"{others} tensors of the engine's LoRA are not those that it was given"
        found.append(("weights", sentence))
    return found

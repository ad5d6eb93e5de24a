"""Faults that a record, or the engine itself, shows without a replay."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, Spec
from flowgrpo_rc.calibration.causes import Symptom
from flowgrpo_rc.calibration.faults import dropped, other_prompts
from flowgrpo_rc.calibration.measure import RecordedRollout
from flowgrpo_rc.calibration.noise import half_precision
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.conditioning import conditioning_error
from flowgrpo_rc.monitoring.health_rules import OTHER_PROMPT
from flowgrpo_rc.monitoring.noise import mean_squares, rollout_noise
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine, other_tensors

# A mean square of noise is about 1, and a sum of fp32 numbers in some order.
MEANS_APART = 2e-5


def check_record(rollout: RecordedRollout, model: FlowModel, *, version: int) -> Iterator[Symptom]:
    """Checks a record apart from its log-probs; the engine was given weights of `version` last."""
    batch = rollout.batch
    request = rollout.request
    different = request.spec.differences(batch.spec)
    if different:
        sentence = f"the engine sampled with other settings: {'; '.join(different)}"
        yield Symptom("settings", sentence)
    scale = model.cfg_scale(request.spec)
    if batch.negative is None and scale > 1:
        fault = dropped(model.cfg_key, model.cfg_value, scale)
        yield Symptom("guidance", f"{fault}, since no negative prompt is recorded")
    schedule = model.walked_schedule(request.spec)
    steps = batch.step_indices
    # torch.equal is also False for tensors of different shapes.
    if not torch.equal(batch.sigmas, schedule.sigmas):
        sentence = "the engine recorded other sigmas than the model's scheduler has"
        yield Symptom("schedule", sentence)
    elif not torch.equal(steps, request.window.to(steps)):
        yield Symptom("window", "the recorded steps are not those that were asked for")
    elif not torch.equal(batch.all_timesteps, schedule.timesteps[steps]):
        yield Symptom("timestep", "the recorded timesteps are not those of the schedule")
    rounded = half_precision(batch.all_latents[:, 1:])
    if rounded:
        yield Symptom("latents", f"every recorded latent is a number of {rounded}")
    versions = sorted(set(batch.policy_version.tolist()))
    if versions != [version]:
        sentence = f"the engine sampled with the weights of version {versions}, not {version}"
        yield Symptom("weights", sentence)


def check_means(batch: DiffusionBatch) -> Iterator[Symptom]:
    """Checks that the recorded means, if any, fit the recorded log-probs.

    A centered log-ratio rests on them, and log-probs that agree do not show that they are wrong.
    """
    if batch.prev_sample_mean is None:
        return
    noise, _ = rollout_noise(batch)
    apart = (noise.double().square().mean(2) - mean_squares(batch)).abs().max().item()
    if not apart <= MEANS_APART:
        words = "the noise of steps has one size by their means, another by log-probs"
        yield Symptom("means", f"{words} ({apart:.1e})")


def check_prompts(rollout: RecordedRollout, model: FlowModel) -> Iterator[Symptom]:
    """Compares recorded conditioning with what the trainer's encoders make of the prompts.

    An engine that encodes itself may record that of another text, which makes no mismatch.
    """

    def differs(prompts: Sequence[Prompt]) -> bool:
        return bool(conditioning_error(model, rollout.batch, prompts).max() > OTHER_PROMPT)

    if differs(rollout.prompts):
        unknown = "changed in a way that is not known here, or encoded by another text encoder"
        changes = other_prompts(rollout.prompts)
        names = (name for name, prompts in changes if not differs(prompts))
        yield Symptom("prompt", f"the engine recorded prompts {next(names, unknown)}")


def check_engine(
    engine: RolloutEngine[ImageRequest], pushed: Mapping[str, Tensor], spec: Spec
) -> Iterator[Symptom]:
    """Reads back what an engine holds, where it shows it, of the LoRA that it was given."""
    plain = engine.plain_layers()
    _, _, quantization = spec.dtype.partition("+")
    if quantization and plain:
        sentence = f"{quantization} is not applied: {plain} layers hold plain weights"
        yield Symptom("quantization", sentence)
    held = engine.held_weights()
    if held is None:
        return
    bound = held.keys() & pushed.keys()
    unbound = len(pushed) - len(bound)
    if not bound:
        sentence = f"the LoRA is bound to no module: none of its {len(pushed)} tensors is held"
        yield Symptom("lora", sentence)
    elif unbound:
        yield Symptom("lora", f"{unbound} of the LoRA's {len(pushed)} tensors are bound nowhere")
    theirs = {name: held[name] for name in bound}
    wrong = other_tensors(theirs, {name: pushed[name] for name in bound})
    if wrong:
        sentence = f"{wrong} tensors of the engine's LoRA are not those that it was given"
        yield Symptom("weights", sentence)

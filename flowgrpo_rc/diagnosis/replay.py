"""Evaluates dumped steps again with the model that sampled them, with and without known faults."""

from dataclasses import replace
from functools import partial

import torch

from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch
from flowgrpo_rc.calibration.causes import Symptom
from flowgrpo_rc.calibration.faults import Lora, Replay
from flowgrpo_rc.calibration.measure import Copy, RecordedRollout, mismatch_of, other_precisions
from flowgrpo_rc.calibration.noise import NoiseReport
from flowgrpo_rc.calibration.verdict import diagnose
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.diagnosis.dump import Dump
from flowgrpo_rc.diagnosis.formulas import USUAL, Formula
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.spec.checks import check_plan
from flowgrpo_rc.spec.machine import machine_of_process
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.training.tasks.image import ImageTask

STEPS = 32  # that are evaluated
ROWS = 8  # of a forward


def check_model(dump: Dump, formula: Formula, config: Config) -> list[Symptom]:
    """Explains why the rollout's log-probs are not those of the model of some settings, if so."""
    complete = len(dump.prompts) == len(dump.start) and not dump.sigmas.isnan().any()
    if config.model.kind != "diffusion" or not complete:
        needed = (
            "model.kind=diffusion, and in the dump 'sigmas' and 'prompts', a text of each sample"
        )
        raise ValueError(f"--model needs {needed}: without them no step can be evaluated")
    spec = resolve(config, machine_of_process(config))
    check_plan(spec)
    config = spec.config
    task = make_task(spec, make_processes(config))
    assert isinstance(task, ImageTask)
    rollout = record(dump, formula, task.model, config)
    sigmas = rollout.batch.sigmas
    expected = task.model.walked_schedule(rollout.batch.spec).sigmas
    if not torch.allclose(sigmas, expected, atol=1e-5):
        step = int((sigmas - expected).abs().argmax())
        evidence = f"sigma {step} is {sigmas[step]:.4g}, and {expected[step]:.4g} by the model's"
        return [Symptom("schedule", f"{evidence} scheduler with its shift")]
    compared = partial(mismatch_of, rollout, task.policy.log_probs(rollout.batch, ROWS), 1.0)
    # Each copy is gone before the next is made.
    copies = [compared(Copy(task.model, name, ROWS)) for name in other_precisions(config)]
    copy = Copy(task.model, config.rollout.dtype, ROWS, config.rollout.options())
    lora = Lora(*[lora_parameters(task.model.network)] * 3)
    replay = Replay(copy, rollout, lora, config.model.lora_alpha / config.model.lora_rank)
    noise = NoiseReport()  # which was looked at
    diagnosis = diagnose(replay, compared(), [compared(copy), *copies], [], noise)
    if diagnosis.doubt is None:
        return []
    return [Symptom(diagnosis.cause or "stale", diagnosis.sentence())]


def record(dump: Dump, formula: Formula, model: FlowModel, config: Config) -> RecordedRollout:
    """Returns some of the steps, each as a sample of its own, as an engine would record them."""
    spec = config.rollout.spec()
    walked = model.walked_schedule(spec).sigmas.double().cpu()
    if walked.shape != dump.sigmas.shape or not torch.allclose(walked, dump.sigmas, atol=1e-5):
        # A whole schedule of as many steps, and none that the settings have shortened.
        spec = replace(spec, num_inference_steps=len(dump.sigmas) - 1, tail_start=None)
    spec = replace(
        spec,
        sde_type=dump.settings["sde_type"],
        noise_level=dump.settings["noise_level"],
        log_prob_convention="gaussian",
        shared_prefix=False,
    )
    shape = model.latent_shape(spec)
    if tuple(dump.shape) != shape:
        sides = f"its latents are {list(dump.shape)}, and the model's {list(shape)}"
        raise ValueError(f"{sides}: set rollout.pipeline.height and width")
    known = formula.drawn.isfinite().nonzero()
    some = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:STEPS]
    at = known[some].unbind(1)
    usual = formula._replace(form=USUAL, std=formula.drawn, factor=1.0)
    log_probs, _ = usual.values(dump, formula.squares(dump, dump.rollout))
    negative = str(dump.settings.get("negative_prompt", ""))
    texts = [dump.prompts[sample] for sample in at[0].tolist()]
    prompts = [Prompt(text=text, index=0, negative_text=negative) for text in texts]
    positive, unconditional = encode_prompts(model, prompts, spec)
    rows = torch.arange(len(some))
    sigmas = dump.sigmas.float()
    place = dump.place[at].unsqueeze(1)
    tensors = {
        **dict.fromkeys(("group", "seed", "policy_version", "prompt_index"), rows),
        "all_latents": torch.stack([dump.start[at], dump.end[at]], 1).unflatten(2, shape),
        "all_timesteps": 1000 * sigmas[place],
        "step_indices": place,
        "sigmas": sigmas,
        "rollout_log_probs": log_probs[at].float().unsqueeze(1),
    }
    on_device = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    batch = DiffusionBatch(spec=spec, conditioning=positive, negative=unconditional, **on_device)
    request = ImageRequest(
        prompts=PromptBatch(step=0, prompts=prompts, slots=rows.tolist()),
        samples_per_prompt=1,
        spec=spec,
        seeds=[],
        window=place,
    )
    return RecordedRollout(request=request, batch=batch)

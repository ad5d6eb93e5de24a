"""The one check: everything that is wrong with a run and can be found without loading a model.

A training, its dry run, a calibration and an evaluation call `check_run`; a plan, which is made for
another machine, calls `check_plan`. So a dry run refuses what a run refuses.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.evaluation.suite import HOW_TO_CHANGE, Suite
from flowgrpo_rc.models.architecture import META, build_architecture
from flowgrpo_rc.models.base import FlowModel, adapter_of
from flowgrpo_rc.models.causal_lm import check_quantization
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.records.checkpoint import Checkpoint
from flowgrpo_rc.records.inputs import Input
from flowgrpo_rc.records.rollout_files import check_headers, replay_files
from flowgrpo_rc.rewards.manager import build_terms, check_kind
from flowgrpo_rc.rollout.check_model import check_model
from flowgrpo_rc.spec.check_engine import check_engine, check_machine
from flowgrpo_rc.spec.check_folder import check_output, checkpoint_to_resume
from flowgrpo_rc.spec.check_inputs import (
    Prompts,
    check_inputs,
    check_overlap,
    inputs_of,
    suites_of,
)
from flowgrpo_rc.spec.check_prompts import check_images, check_rows, check_texts
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.optim import check_optimizer

logger = logging.getLogger(__name__)


class RunInputs(NamedTuple):
    """Holds what a run starts from, read while it was checked."""

    prompts: Prompts  # without suites if nothing is trained
    read: Mapping[str, Input]  # what decides what is trained, by the setting that names it
    resumed: Checkpoint | None  # None for a new run
    first_prompt: str = ""  # of a language model, as tokens for a reader


def check_run(spec: RunSpec, *, samples: bool = True, trains: bool = True) -> RunInputs:
    """Checks everything that can be checked without loading a model.

    What needs only this machine comes first, then the small files of the model, which may have to
    be fetched from the hub. `samples` is False where no engine is used, as in an evaluation, and
    `trains` where nothing is written to `trainer.output_dir`.
    """
    prompts = check_inputs(spec, trains=trains)
    if samples:
        check_engine(spec)
    config = spec.config
    read = inputs_of(spec, prompts) if trains else {}
    resumed = checkpoint_to_resume(config, read) if trains else None
    if trains and config.data.replay_dir is not None:
        sampler = config.rollout.token_spec() if spec.is_text else config.rollout.spec()
        folder = Path(config.data.replay_dir).expanduser()
        check_headers(replay_files(folder, 0, spec.machine.num_processes), sampler, {})
    model = _check_model(spec, prompts.suites)
    if model is not None:
        check_images(spec, model, prompts)
    if samples:
        check_machine(spec)
    first = check_texts(spec, model, prompts, prompts.suites)
    if trains and model is not None:
        check_networks(spec, model)
        check_output(config, num_trained(model))
    if trains:
        check_overlap(config, prompts)
        check_rows(spec, prompts)
    return RunInputs(prompts, read, resumed, first)


def check_suites(spec: RunSpec) -> list[Suite]:
    """Checks an evaluation by `trainer.suites`, which asks no prompts or rewards of the run."""
    check_settings(spec)
    suites = suites_of(spec.config)
    check_texts(spec, _check_model(spec, suites), None, suites)
    return suites


def check_plan(spec: RunSpec) -> FlowModel | None:
    """Checks what holds on every machine: the settings, the engine's options and the model.

    Returns the model on the meta device, with its LoRA; None for a language model.
    """
    check_settings(spec)
    check_engine(spec)
    model = _check_model(spec)
    if model is not None:
        check_networks(spec, model)
    return model


def num_trained(model: FlowModel) -> int:
    """Returns how many numbers the LoRA on a model holds."""
    return sum(parameter.numel() for parameter in lora_parameters(model.network).values())


def batch_bytes(spec: RunSpec, model: FlowModel) -> int:
    """Returns the bytes of the latents of a step on one process, and of their means if kept."""
    elements = math.prod(model.latent_shape(spec.config.rollout.spec()))
    return 4 * spec.samples_per_step * spec.states_per_sample * elements


def _check_model(spec: RunSpec, suites: Sequence[Suite] = ()) -> FlowModel | None:
    """Checks settings and rewards against the model, and returns it on the meta device, with its
    LoRA; None for a language model.
    """
    config = spec.config
    if config.model.kind != "diffusion":
        check_quantization(config.model)
        return None
    adapter = adapter_of(config.model)
    check_model(adapter, config.rollout)
    if suites and config.rollout.pipeline.condition_images:
        raise ValueError(
            f"trainer.suites: the prompts of {suites[0].name} bring no images, but "
            f"rollout.pipeline.condition_images={config.rollout.pipeline.condition_images}: drop "
            "one of them"
        )
    for terms in (spec.rewards, *(build_terms(suite.reward) for suite in suites)):
        check_kind(terms, adapter.makes, "latent")
    samplers = {
        "rollout.pipeline": config.rollout.spec(),
        "rollout.val_kwargs": config.rollout.held_out_spec(),
    }
    folder = Path(config.model.path).expanduser()
    path = str(folder) if folder.exists() else config.model.path
    model = build_architecture(replace(config.model, path=path))
    for suite in suites:
        key = f"suite {suite.name}: sampler"
        rollout = suite.applied(config.rollout)
        held_out = samplers["rollout.val_kwargs"]
        pinned = [f"{k}={v}" for k, v in suite.sampler.items() if v != getattr(held_out, k)]
        if pinned:
            words = "suite %s pins %s: rollout.val_kwargs does not reach it"
            logger.warning(words, suite.name, ", ".join(pinned))
        try:
            check_model(adapter, rollout, key, pinned=suite.sampler)
            model.check(rollout.held_out_spec(), key)
        except ValueError as error:
            raise ValueError(f"{error}; {HOW_TO_CHANGE.format(suite.name)}") from error
        samplers[key] = rollout.held_out_spec()
    guided = any(adapter.cfg_scale(sampler) > 1 for sampler in samplers.values())
    if config.data.negative_prompt and not guided:
        raise ValueError(
            f"data.negative_prompt={config.data.negative_prompt!r} has no effect without guidance: "
            f"set rollout.pipeline.{adapter.cfg_key} above {adapter.unguided_scale:g}, or drop it"
        )
    for key, sampler in samplers.items():
        model.check(sampler, key)
        model.check_scheduler(sampler)
        model.check_decoding(sampler)
    with META:
        network = add_lora(model, config.model, config.trainer.seed)
    check_optimizer(list(lora_parameters(network).values()), config.actor.optim)
    for option in config.rollout.options():
        option.check_network(network)
    return model


def check_networks(spec: RunSpec, model: FlowModel) -> None:
    """Checks that the trained steps fit a model whose transformers share the schedule.

    Processes that share the frozen weights must run the same transformer. Warns of one whose steps
    are never trained: its LoRA stays without effect.
    """
    if len(model.networks) == 1:
        return
    config = spec.config
    networks = model.networks_of_steps(config.rollout.spec())
    size, first, last = config.rollout.window()
    algo = config.rollout.algo
    same = algo.sde_window_interval is not None or algo.window_sharing == "batch"
    same |= size == last - first
    if spec.forward_loss is not None:
        # Noise levels are drawn from the whole schedule.
        first, last, same = 0, config.rollout.pipeline.num_inference_steps, False
    trained = networks[first:last]
    ranges = f"steps {first} to {last - 1} of {len(networks)}"
    for name in model.networks:
        if name not in trained:
            logger.warning(
                "the LoRA of %s gets no gradient and stays without effect: the trained %s belong "
                "to %s, and %d step(s) of the schedule to %s. Widen "
                "rollout.algo.sde_window_range to train both",
                *(name, ranges, " and ".join(set(trained)), networks.count(name), name),
            )
    sharded = (
        spec.machine.num_processes > 1 and resolve_strategy(config.trainer.strategy) == "fsdp2"
    )
    if sharded and len(set(trained)) > 1 and not same:
        raise ValueError(
            f"trainer.strategy=fsdp2 shares the frozen weights of {' and '.join(model.networks)}, "
            f"and with rollout.algo.window_sharing={algo.window_sharing} processes would run "
            f"different ones at the same time, which hangs: the trained {ranges} lie on both sides "
            "of the boundary. Set rollout.algo.window_sharing=batch, or trainer.strategy=ddp"
        )

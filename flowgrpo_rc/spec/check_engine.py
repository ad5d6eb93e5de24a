"""Checks of the rollout engine and of the machine: class, options, packages, kernels, compilers.

Nothing is loaded.
"""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.models.base import adapter_of
from flowgrpo_rc.models.index import ABSENT, read_index
from flowgrpo_rc.plugins import check_options, check_packages, refuse
from flowgrpo_rc.rollout.options.option import Need
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.workers.cluster import check_reachable, spare_gpus

ENGINE_KWARGS = "rollout.engine_kwargs"
CXX_COMPILERS = ("g++", "clang++")
C_COMPILERS = ("gcc", "clang")


def _check_offers(spec: RunSpec) -> None:
    """Refuses what the engine's class does not offer."""
    config, engine = spec.config, spec.engine_class
    rollout, kind, name = config.rollout, config.model.kind, f"rollout.name={config.rollout.name}"
    images = rollout.pipeline.condition_images
    needs_means = config.data.replay_dir is None and spec.keeps_means
    refuse(
        (engine.kind != kind, f"{name} samples from model.kind={engine.kind}, not {kind}"),
        (
            config.trainer.tf32 and rollout.dtype == "fp32" and not engine.copies_network,
            f"trainer.tf32=true does not reach {name}: set rollout.dtype=bf16, or drop it",
        ),
        (
            needs_means and not engine.records_means,
            f"{name} does not record the means of its steps (`RolloutEngine.records_means`), which "
            f"{' and '.join(spec.means_readers)} reads: use another engine, or do without",
        ),
        (
            images and not engine.takes_images,
            f"rollout.pipeline.condition_images={images}: {name} samples from texts alone; set "
            "rollout.name=diffusers",
        ),
        (
            spec.forward_loss is not None and not engine.finishes_alone,
            f"{name} records steps (`RolloutEngine.finishes_alone`), and {DIFFUSION_KEY}.loss_mode="
            f"{config.actor.diffusion_loss.loss_mode} trains on finished samples: set "
            "rollout.name=diffusers, or take another loss",
        ),
    )


def _ruled_out(spec: RunSpec) -> dict[Need, str]:
    """Returns what the run cannot give an option, each with the setting that rules it out."""
    config, rollout = spec.config, spec.config.rollout
    correction = config.algorithm.rollout_correction
    comparing = [name for name, term in spec.rewards.items() if term.reward.groupwise]
    sharing = f"rollout.algo.window_sharing={rollout.algo.window_sharing}"
    rows = (
        (Need.NETWORK, not spec.engine_class.copies_network, f"rollout.name={rollout.name}"),
        (Need.WHOLE_WEIGHTS, _is_split(config), "trainer.strategy=fsdp2"),
        (
            Need.PLAIN_WEIGHTS,
            config.model.quantization,
            f"model.quantization={config.model.quantization}",
        ),
        (Need.SHARED_WINDOW, rollout.algo.window_sharing == "sample", sharing),
        (Need.TRAINER_PROCESS, rollout.workers, f"rollout.workers={rollout.workers}"),
        (Need.FRESH_WEIGHTS, rollout.staleness, f"rollout.staleness={rollout.staleness}"),
        (Need.NEW_SAMPLES, config.data.replay_dir, f"data.replay_dir={config.data.replay_dir}"),
        (Need.UNSAVED_SAMPLES, config.trainer.save_rollouts, "trainer.save_rollouts=true"),
        (
            Need.ONE_POOL,
            config.algorithm.filter_groups.enable,
            "algorithm.filter_groups.enable=true",
        ),
        (Need.WHOLE_GROUPS, correction.excludes_rejected, f"{KEY}.exclude_rejected=true"),
        (Need.SINGLE_SCORES, comparing, f"reward.terms.{', '.join(comparing)}"),
    )
    return {need: setting for need, applies, setting in rows if applies}


def _check_options(spec: RunSpec) -> None:
    """Refuses options that the engine does not take, or whose needs the run or another does not
    meet.
    """
    options, ruled_out = spec.config.rollout.options(), _ruled_out(spec)
    for option in options:
        if option.in_engine and type(option) not in spec.engine_class.options:
            raise ValueError(
                f"{option.setting} has no effect with rollout.name={spec.config.rollout.name}: "
                "drop it; an engine's own options stand in rollout.engine_kwargs"
            )
        lacking = dict(ruled_out)
        for other in options:
            if other is not option:
                lacking |= dict.fromkeys(other.removes, other.setting)
        for need, setting in lacking.items():
            if need in option.needs:
                raise ValueError(
                    f"{option.setting} needs {need.value}, which {setting} rules out: drop one of "
                    "them"
                )


def _is_split(config: Config) -> bool:
    return resolve_strategy(config.trainer.strategy) == "fsdp2"


def shares_weights(spec: RunSpec) -> bool:
    """Returns whether the engine samples with the trainer's own weights, whole and as they are."""
    config, rollout = spec.config, spec.config.rollout
    same = spec.engine_class.copies_network and rollout.dtype == config.model.dtype
    options = rollout.options()
    return same and not _is_split(config) and all(option.shares_weights for option in options)


def check_engine(spec: RunSpec) -> None:
    """Raises ValueError if there is no such engine, or if it does not take the options."""
    config, engine = spec.config, spec.engine_class
    _check_offers(spec)
    kept = config.model.prompt_cache
    sampled_here = config.data.replay_dir is None and not config.rollout.workers
    if kept and not (sampled_here and engine.copies_network):
        raise ValueError(
            f"model.prompt_cache={kept} needs prompts that the trainer's process encodes: set "
            "rollout.name=diffusers and rollout.workers=0 without data.replay_dir, or drop it"
        )
    _check_options(spec)
    if config.model.offload_idle == "layers" and not shares_weights(spec):
        raise ValueError(
            "model.offload_idle=layers: the rollout has to share the weights on the host as they "
            f"are: set rollout.name=diffusers, rollout.dtype={config.model.dtype}, rollout."
            "quantization=null, rollout.compile=false, rollout.merge_lora=false and "
            "trainer.strategy=ddp, or model.offload_idle=true"
        )
    if config.data.replay_dir is None:
        built_with = spec.engine_options | {"model": None, "network": None}
        check_options(engine, built_with, ENGINE_KWARGS)


def check_machine(spec: RunSpec) -> None:
    """Checks that this machine can do what the settings ask for."""
    config, device = spec.config, spec.machine.device
    if config.model.offload_idle and device.type == "cpu":
        given = str(config.model.offload_idle).lower()
        raise ValueError(f"model.offload_idle={given} has no effect on the CPU: drop it")
    rollout = config.rollout
    for option in rollout.options():
        option.check_device(device, rollout.options())
    if config.data.replay_dir is None:
        _check_workers(spec)
        _check_options_on(spec)
    _check_compiler(config, device)


def _check_workers(spec: RunSpec) -> None:
    config, rollout = spec.config, spec.config.rollout
    processes = config.trainer.num_processes
    if rollout.workers == 0:
        return
    check_packages(f"rollout.workers={rollout.workers}", ["ray"], "ray")
    if rollout.ray_address is not None:
        check_reachable(rollout.ray_address)
        return
    asked = processes if isinstance(processes, int) else 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", asked))
    spare_gpus(spec.machine.device, here, rollout.workers, spec.gpus_per_worker)


def _check_options_on(spec: RunSpec) -> None:
    """Looks for the package that quantizes, and has the engine check options, model and device."""
    config, engine = spec.config, spec.engine_class
    for option in config.rollout.options():
        check_packages(option.setting, option.packages, "quantization")
    pipeline_class = ""
    absent: list[str] = []
    if config.model.kind == "diffusion":
        pipeline_class = adapter_of(config.model).serves()
        index = read_index(config.model)
        absent = [name for name, value in index.items() if value == ABSENT]
    try:
        engine.check(pipeline_class, absent, spec.machine.device, spec.engine_options)
    except ValueError as error:
        raise ValueError(f"{ENGINE_KWARGS}: {error}") from error
    except ImportError as error:
        raise ValueError(f"rollout.name={config.rollout.name}: {error}") from error


def missing_for_compiling(device: torch.device) -> list[str]:
    """Returns what torch.compile lacks here, in words."""
    # On a GPU Triton builds its launchers in C.
    language, compilers = ("C++", CXX_COMPILERS) if device.type == "cpu" else ("C", C_COMPILERS)
    lacking = []
    chosen = os.environ.get("CXX" if device.type == "cpu" else "CC")
    if not any(map(shutil.which, [chosen] if chosen else compilers)):
        lacking.append(f"a {language} compiler ({chosen or ' or '.join(compilers)})")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if device.type != "cpu" and not header.exists():
        lacking.append(f"{header} (the package python3-dev or the like)")
    return lacking


def _check_compiler(config: Config, device: torch.device) -> None:
    lacking = missing_for_compiling(device)
    for key, compiles in (
        ("rollout.compile=true", config.rollout.compile),
        ("actor.optim.name=adamw_8bit", config.actor.optim.name == "adamw_8bit"),
    ):
        if compiles and lacking:
            raise ValueError(
                f"{key} on {device.type} needs {' and '.join(lacking)}: install what is missing, "
                f"or drop {key}"
            )

"""Checks of the rollout engine and of the machine: class, options, packages, kernels, compilers.

Nothing is loaded. `engine_of` and `engine_options` also serve whoever builds the engine.
"""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.config.check_settings import refuse
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.models.base import adapter_of
from flowgrpo_rc.models.index import ABSENT, read_index
from flowgrpo_rc.plugins import check_options, check_packages, load_class
from flowgrpo_rc.rollout.config import PACKAGE
from flowgrpo_rc.rollout.devices import AUTO
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.rollout.quantization import check_device
from flowgrpo_rc.workers.cluster import check_reachable, spare_gpus

ENGINE_KWARGS = "rollout.engine_kwargs"
CXX_COMPILERS = ("g++", "clang++")
C_COMPILERS = ("gcc", "clang")


def chunk_size(config: Config) -> int:
    """Returns the samples of one forward while sampling."""
    return config.rollout.micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu


def engine_class(config: Config) -> type[RolloutEngine[Any]]:
    """Returns the class that `rollout.name` names; ValueError if there is none."""
    try:
        found: type[RolloutEngine[Any]] = load_class(PACKAGE, config.rollout.name, RolloutEngine)
    except ValueError as error:
        raise ValueError(f"rollout.name: {error}") from error
    return found


def engine_of(config: Config) -> type[RolloutEngine[Any]]:
    """Returns the class of the rollout engine, once it has been checked."""
    engine = engine_class(config)
    rollout, kind, name = config.rollout, config.model.kind, f"rollout.name={config.rollout.name}"
    offered = ", ".join(engine.quantizations) or "none (see rollout.engine_kwargs)"
    useless = f"has no effect with {name}: drop it"
    images, merge = rollout.pipeline.condition_images, rollout.merge_lora
    needs_means = config.data.replay_dir is None and config.keep_means()
    own = config.model.quantization and f"model.quantization={config.model.quantization}"
    quantized = own or f"rollout.quantization={rollout.quantization}"
    aligned = config.actor.replay == "aligned"
    refuse(
        (engine.kind != kind, f"{name} samples from model.kind={engine.kind}, not {kind}"),
        (
            rollout.quantization not in (None, *engine.quantizations),
            f"rollout.quantization={rollout.quantization!r}: {name} offers {offered}",
        ),
        (rollout.compile is True and not engine.compiles, f"rollout.compile=true {useless}"),
        (merge and not engine.merges_lora, f"rollout.merge_lora={merge} {useless}"),
        (
            rollout.quantization and own,
            f"rollout.quantization={rollout.quantization}: {name} samples with the trainer's "
            f"weights, which {own} has rounded already: drop one of them",
        ),
        (
            merge is True and (own or rollout.quantization),
            f"rollout.merge_lora=true cannot add a LoRA to the weights of {quantized}: drop one",
        ),
        (
            config.trainer.tf32 and rollout.dtype == "fp32" and not engine.copies_network,
            f"trainer.tf32=true does not reach {name}: set rollout.dtype=bf16, or drop it",
        ),
        (
            needs_means and not engine.records_means,
            f"{name} does not record the means of its steps (`RolloutEngine.records_means`), which "
            f"{' and '.join(config.compares_means())} reads: use another engine, or do without",
        ),
        (
            images and not engine.takes_images,
            f"rollout.pipeline.condition_images={images}: {name} samples from texts alone; set "
            "rollout.name=diffusers",
        ),
        (
            config.knows_no_log_probs() and not engine.finishes_alone,
            f"{name} records steps (`RolloutEngine.finishes_alone`), and {DIFFUSION_KEY}.loss_mode="
            f"{config.actor.diffusion_loss.loss_mode} trains on finished samples: set "
            "rollout.name=diffusers, or take another loss",
        ),
        (
            aligned and rollout.algo.shared_prefix,
            "actor.replay=aligned: with rollout.algo.shared_prefix=true forwards of rollout and "
            "update have other sizes; drop one of them",
        ),
        (
            aligned and not engine.aligns,
            f"actor.replay=aligned: {name} forms batches of its own; set rollout.name=diffusers, "
            "or drop it",
        ),
    )
    return engine


def _check_cache(config: Config, engine: type[RolloutEngine[Any]]) -> None:
    """Refuses cached and redrawn samples where the engine or an aligned replay cannot have them."""
    cache = config.rollout.cache
    refuse(
        (
            config.rollout.redraw and not engine.copies_network,
            f"rollout.redraw=true draws with a copy of the trainer's network, and rollout.name="
            f"{config.rollout.name} loads its own: set rollout.name=diffusers, or drop it",
        ),
        (
            cache.every > 1 and not engine.caches_blocks,
            f"rollout.cache.every={cache.every} has no effect with rollout.name="
            f"{config.rollout.name}: drop it",
        ),
        (
            config.actor.replay == "aligned" and cache.every > 1 and cache.window,
            "actor.replay=aligned: with rollout.cache.window=true the rollout skips blocks that "
            "the update evaluates; drop one of them",
        ),
    )


def shares_weights(config: Config, engine: type[RolloutEngine[Any]]) -> bool:
    """Returns whether an engine samples with the trainer's own weights, whole and as they are."""
    rollout = config.rollout
    is_split = resolve_strategy(config.trainer.strategy) == "fsdp2"
    changed = is_split or rollout.quantization or rollout.compile or rollout.merge_lora
    return engine.copies_network and rollout.dtype in (AUTO, config.model.dtype) and not changed


def engine_options(config: Config) -> dict[str, Any]:
    """Returns what the engine is built with, besides the model and its network."""
    rollout = config.rollout
    options: dict[str, Any] = {"dtype": rollout.dtype, "chunk_size": chunk_size(config)}
    # Only an engine that offers these has options of these names.
    offered = {name: getattr(rollout, name) for name in ("quantization", "compile", "merge_lora")}
    options |= {name: value for name, value in offered.items() if value not in (None, False, AUTO)}
    if rollout.cache.every > 1:
        options["cached_blocks"] = tuple(rollout.cache.blocks)
    return options | rollout.engine_kwargs


def check_engine(config: Config) -> None:
    """Raises ValueError if there is no such engine, or if it does not take the options."""
    engine, kept = engine_of(config), config.model.prompt_cache
    sampled_here = config.data.replay_dir is None and not config.rollout.workers
    if kept and not (sampled_here and engine.copies_network):
        raise ValueError(
            f"model.prompt_cache={kept} needs prompts that the trainer's process encodes: set "
            "rollout.name=diffusers and rollout.workers=0 without data.replay_dir, or drop it"
        )
    _check_cache(config, engine)
    if config.model.offload_idle == "layers" and not shares_weights(config, engine):
        raise ValueError(
            "model.offload_idle=layers: the rollout has to share the weights on the host as they "
            f"are: set rollout.name=diffusers, rollout.dtype={config.model.dtype}, rollout."
            "quantization=null, rollout.compile=false, rollout.merge_lora=false and "
            "trainer.strategy=ddp, or model.offload_idle=true"
        )
    if config.data.replay_dir is None:
        built_with = engine_options(config) | {"model": None, "network": None}
        check_options(engine, built_with, ENGINE_KWARGS)


def check_machine(config: Config, device: torch.device) -> None:
    """Checks that this machine, and `device` in it, can do what the settings ask for."""
    if config.model.offload_idle and device.type == "cpu":
        given = str(config.model.offload_idle).lower()
        raise ValueError(f"model.offload_idle={given} has no effect on the CPU: drop it")
    rollout = config.rollout
    check_device(rollout.dtype, rollout.quantization, device, rollout.compile is True)
    if config.data.replay_dir is None:
        _check_workers(config, device)
        _check_options_on(config, device)
    _check_compiler(config, device)
    if rollout.merge_lora is True and resolve_strategy(config.trainer.strategy) == "fsdp2":
        raise ValueError(
            "rollout.merge_lora=true needs the trainer's whole weights on each process, and "
            "trainer.strategy=fsdp2 shards them: drop one of them"
        )


def _check_workers(config: Config, device: torch.device) -> None:
    rollout, processes = config.rollout, config.trainer.num_processes
    if rollout.workers == 0:
        return
    check_packages(f"rollout.workers={rollout.workers}", ["ray"], "ray")
    if rollout.ray_address is not None:
        check_reachable(rollout.ray_address)
        return
    asked = processes if isinstance(processes, int) else 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", asked))
    spare_gpus(device, here, rollout.workers, config.gpus_per_worker(device.type))


def _check_options_on(config: Config, device: torch.device) -> None:
    """Looks for the package that quantizes, and has the engine check options, model and device."""
    engine, quantization = engine_of(config), config.rollout.quantization
    if quantization is not None:
        package = engine.quantizations[quantization]
        check_packages(f"rollout.quantization={quantization}", [package], "quantization")
    pipeline_class = ""
    absent: list[str] = []
    if config.model.kind == "diffusion":
        pipeline_class = adapter_of(config.model).serves()
        index = read_index(config.model)
        absent = [name for name, value in index.items() if value == ABSENT]
    try:
        engine.check(pipeline_class, absent, device, engine_options(config))
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
        ("rollout.compile=true", config.rollout.compile is True),
        ("actor.optim.name=adamw_8bit", config.actor.optim.name == "adamw_8bit"),
    ):
        if compiles and lacking:
            raise ValueError(
                f"{key} on {device.type} needs {' and '.join(lacking)}: install what is missing, "
                f"or drop {key}"
            )

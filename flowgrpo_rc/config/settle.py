"""Settings that a run decides itself where they are left open."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo_rc.config.check_engine import chunk_size, engine_class, missing_for_compiling
from flowgrpo_rc.config.check_folder import config_of_run
from flowgrpo_rc.config.machine import device_of
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.records.rollout_files import keeps_means
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import RunLog
from flowgrpo_rc.rewards.manager import settled_rewards
from flowgrpo_rc.rollout.compiling import repays
from flowgrpo_rc.rollout.devices import AUTO, faster_dtype, onednn_is_faster
from flowgrpo_rc.rollout.engine import RolloutEngine

# Pixels that a CPU decodes at once. Timed from 16 x 32 to 128 x 128 on the bundled model with 1 MiB
# of cache a core, and 32 shared: from half to twice as many take no longer.
DECODED_PIXELS = 2**15


def settled(config: Config, device: torch.device | None = None) -> Config:
    """Returns the settings with a value where they leave one open.

    These are the engine of OCR, `rollout.dtype`, by this machine or `device`, `rollout.merge_lora`,
    `model.decode_batch_size`, `model.onednn`, `centered`, and a clip that has no mismatch to
    follow; their keys say what they become. A new run leaves `rollout.compile` to `settle_compile`.

    A run that goes on in `trainer.output_dir` keeps what it has, but for merged weights where they
    are sharded now.
    """
    config = config.with_fixed_clip()
    earlier = config_of_run(config)
    reward = settled_rewards(config.reward, earlier.reward if earlier else None)
    config = replace(config, reward=reward)
    if config.model.decode_batch_size == AUTO:
        at_once = earlier.model.decode_batch_size if earlier else _decoded_at_once(config, device)
        config = replace(config, model=replace(config.model, decode_batch_size=at_once))
    model = config.model
    if model.onednn == AUTO and model.kind == "diffusion":
        in_fp32 = model.dtype == "fp32" and model.quantization is None
        if earlier:
            faster = earlier.model.onednn
        else:
            faster = in_fp32 and onednn_is_faster(device or device_of(config))
        config = replace(config, model=replace(model, onednn=faster))
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    if rollout.compile == AUTO and earlier:
        rollout = replace(rollout, compile=earlier.rollout.compile)
    if rollout.dtype == AUTO:
        dtype = earlier.rollout.dtype if earlier else faster_dtype(device or device_of(config))
        rollout = replace(rollout, dtype=dtype)
    if rollout.merge_lora is None:
        sharded = resolve_strategy(config.trainer.strategy) == "fsdp2"
        wanted = earlier.rollout.merge_lora if earlier else _merges_at_no_loss(config)
        rollout = replace(rollout, merge_lora=False if sharded and wanted is True else wanted)
    if correction.centered is None:
        centered = earlier.algorithm.rollout_correction.centered if earlier else _has_means(config)
        correction = replace(correction, centered=centered)
    algorithm = replace(config.algorithm, rollout_correction=correction)
    return replace(config, rollout=rollout, algorithm=algorithm)


def settle_compile(
    config: Config,
    task: Any,
    sampler: PromptSampler,
    make_engine: Callable[[Config, Any], RolloutEngine[Any]],
    processes: Processes,
    folder: RunFolder,
    log: RunLog,
    first_step: int,
) -> Config:
    """Returns the settings with `rollout.compile` decided, which it tells and writes down.

    The first process decides for all, by a chunk of its samples of the first step.
    """
    rollout, count, step = config.rollout, processes.count, max(1, first_step)
    if rollout.compile != AUTO:
        return config
    lacking = missing_for_compiling(processes.device)
    if not engine_class(config).compiles:
        lacking = ["an engine that offers it"]
    compiles, why = False, f"it needs {' and '.join(lacking)}"
    if processes.is_main and not lacking:
        drawn, batch = sampler.step(step - 1), config.actor.ppo_mini_batch_size
        prompts = shard(drawn, step=step, mini_batch_size=batch, rank=0, world_size=count)
        asked = task.request(prompts, range(config.samples_per_step(count)))
        chunks = asked.chunks(chunk_size(config))
        steps = config.trainer.total_training_steps - step + 1

        def engine(compiled: bool) -> RolloutEngine[Any]:
            settings = replace(config, rollout=replace(rollout, compile=compiled))
            return make_engine(settings, task.model)

        one = replace(asked, only=chunks[0], decode=False)
        num_chunks = len(chunks) * steps * count // (rollout.workers or count)
        compiles, why = repays(engine, one, num_chunks)
    compiles = processes.any(compiles)
    log.console.message(f"note: rollout.compile={AUTO}: {str(compiles).lower()} ({why})")
    config = replace(config, rollout=replace(rollout, compile=compiles))
    if processes.is_main:
        folder.write_settings(asdict(config))
    return config


def _decoded_at_once(config: Config, device: torch.device | None) -> int | None:
    """Returns how many pictures are decoded at once; counted, since timing may choose anew."""
    if (device or device_of(config)).type != "cpu":
        return None
    size = config.rollout.pipeline
    return max(1, DECODED_PIXELS // (size.height * size.width))


def _merges_at_no_loss(config: Config) -> bool:
    """Returns whether the LoRA may be added to the sampling weights, if they are whole.

    Not where the weights are exact and the sum would be rounded to bf16, or where a replay has to
    give the rollout's very bits.
    """
    return (
        engine_class(config).merges_lora
        and config.rollout.quantization is config.model.quantization is None
        and config.model.dtype != "bf16"
        and config.model.offload_idle != "layers"
        and config.actor.replay != "aligned"
    )


def _has_means(config: Config) -> bool:
    """Returns whether the rollout's steps come with their means, if they are asked for."""
    if config.model.kind == "causal_lm" or config.knows_no_log_probs():
        return False
    if config.data.replay_dir is not None:
        return keeps_means(Path(config.data.replay_dir).expanduser())
    return engine_class(config).records_means

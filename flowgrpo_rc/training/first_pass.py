"""The first pass over the prompts of a run, before its first step (`model.prompt_cache`)."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.models.index import model_file
from flowgrpo_rc.models.prompt_cache import PromptCache
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.records.inputs import model_inputs
from flowgrpo_rc.rewards.base import batches
from flowgrpo_rc.training.tasks.image import ImageTask
from flowgrpo_rc.training.tasks.task import Task


def encode_ahead(
    task: Task,
    prompts: tuple[PromptSampler, Sequence[Prompt], Sequence[Suite]],
    processes: Processes,
    steps: range,
    mini_batch_size: int,
) -> None:
    """Encodes what a process samples in some steps and evaluations, for the model's cache.

    They are encoded in the batches of a run that keeps nothing. Meanwhile the transformer is on the
    host, so that the encoders have the device for themselves.
    """
    assert isinstance(task, ImageTask)
    model = task.model
    rollout = task.config
    sampler, held_out, suites = prompts
    rank = processes.rank
    count = processes.count
    batches_to_encode = []
    for step in steps:
        drawn = sampler.step(step - 1)
        share_of_step = shard(
            drawn, step=step, mini_batch_size=mini_batch_size, rank=rank, world_size=count
        )
        batches_to_encode.append((share_of_step.prompts, rollout.spec(step)))
    first = held_out[: rollout.val_kwargs.n]
    evaluated = [(first, rollout), (first[:NUM_FOLLOWED], rollout)]
    evaluated += [([*suite.prompts] * suite.seeds, suite.applied(rollout)) for suite in suites]
    for read, sampled in evaluated:
        size = -(-len(read) // count)
        share = read[rank * size :][:size] or read[-1:]
        rows = batches(len(share), rollout.val_kwargs.batch_size)
        spec = sampled.held_out_spec()
        batches_to_encode += [(share[some_rows], spec) for some_rows in rows]
    model.network.to("cpu")
    with model.encoders_at_work():
        for batch, spec in batches_to_encode:
            encode_prompts(model, batch, spec)
    model.network.to(model.device)


def make_prompt_cache(
    config: ModelConfig, model: FlowModel, device: torch.device, *, tf32: bool
) -> PromptCache:
    """Makes what keeps encoded prompts; whatever changes their bits is part of its settings."""
    left_out = {*model.networks, "scheduler"}
    folder = model_file(config.path, INDEX_FILES["diffusion"]).parent
    read = model_inputs("model.path", folder).items()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    settings = {
        "files": {name: file.digest for name, file in read if name.split("/")[1] not in left_out},
        "model": [str(type(model)), config.dtype, tf32],
        # Libraries choose a kernel by machine and threads.
        "machine": [card, torch.get_num_threads()],
        "versions": [version(name) for name in ("torch", "transformers", "diffusers")],
    }
    place = str(config.prompt_cache)
    cache_folder = None if place == "memory" else Path(place).expanduser()
    return PromptCache(settings, cache_folder, by_batch=model.pads_to_longest)

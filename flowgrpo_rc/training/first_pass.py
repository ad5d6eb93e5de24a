"""The first pass over the prompts of a run, before its first step (`model.prompt_cache`)."""

from collections.abc import Sequence

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.policies.encode_prompts import encode_prompts
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
    model, rollout = task.model, task.config
    sampler, held_out, suites = prompts
    rank, count = processes.rank, processes.count
    asked = []
    for step in steps:
        drawn = sampler.step(step - 1)
        own = shard(drawn, step=step, mini_batch_size=mini_batch_size, rank=rank, world_size=count)
        asked.append((own.prompts, rollout.spec(step)))
    first = held_out[: rollout.val_kwargs.n]
    evaluated = [(first, rollout), (first[:NUM_FOLLOWED], rollout)]
    evaluated += [([*suite.prompts] * suite.seeds, suite.applied(rollout)) for suite in suites]
    for read, sampled in evaluated:
        size = -(-len(read) // count)
        share = read[rank * size :][:size] or read[-1:]
        rows = batches(len(share), rollout.val_kwargs.batch_size)
        asked += [(share[each], sampled.held_out_spec()) for each in rows]
    model.network.to("cpu")
    with model.encoders_at_work():
        for batch, spec in asked:
            encode_prompts(model, batch, spec)
    model.network.to(model.device)

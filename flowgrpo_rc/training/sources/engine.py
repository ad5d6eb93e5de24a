"""Trajectories that a rollout engine samples."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import torch

from flowgrpo_rc.batch import PromptBatch
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.data.prompts import PromptSampler, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.samples import Shown
from flowgrpo_rc.rewards.collect import collect_rewards
from flowgrpo_rc.rewards.groups import Groups
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk, RolloutRequest, check_settings
from flowgrpo_rc.training.sources.source import Collected, Engine, RolloutSource
from flowgrpo_rc.training.tasks.task import Task


@dataclass(eq=False)
class EngineSource(RolloutSource):
    """Samples with an engine, and has finished chunks scored while the rest is sampled."""

    engine: Engine
    task: Task
    sampler: PromptSampler
    rewards: RewardManager
    processes: Processes
    config: RolloutConfig
    _: KW_ONLY
    mini_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        """Starts the thread that receives what is sampled elsewhere."""
        self._receiver = ThreadPoolExecutor(
            1, thread_name_prefix="rollout", initializer=_use, initargs=(self.processes.device,)
        )

    def collect(self, step: int) -> Collected:
        """Samples a step with the newest weights. EngineError if the engine used others."""
        return self.sample(self.prompts(step))

    def sample(self, prompts: PromptBatch, refill: int = 0) -> Collected:
        """Samples prompts of a step, as `collect` does; each `refill` has noise of its own."""
        collected = self.ask(prompts, refill)()
        collected.check_versions(prompts.step)
        return collected

    def redraw(self, step: int, rows: Sequence[int]) -> Collected:
        """Samples the given rows of a step alone, in order; there are as many of each prompt."""
        prompts = self.prompts(step)
        request = self.task.request(prompts, self._seeds(prompts))
        assert isinstance(request, ImageRequest)
        chosen = replace(
            request,
            samples_per_prompt=len(rows) // len(prompts.prompts),
            seeds=[request.seeds[row] for row in rows],
            noise_seeds=[request.latent_seeds[row] for row in rows],
            window=request.window[list(rows)],
        )
        return self._receive(chosen, self.engine.generate(chosen))

    def ask(self, prompts: PromptBatch, refill: int = 0) -> Callable[[], Collected]:
        """Asks for samples with the engine's present weights; returns what waits for them."""
        request = self.task.request(prompts, self._seeds(prompts, refill))
        if not self.engine.elsewhere:
            return lambda: self._receive(request, self.engine.generate(request))
        # The work begins now; a thread hands chunks to the rewards as they arrive.
        return self._receiver.submit(self._receive, request, self.engine.generate(request)).result

    def _receive(self, request: RolloutRequest, chunks: Iterator[RolloutChunk]) -> Collected:
        batches = []
        handles = []
        shown = []
        blocks = []
        for chunk in chunks:
            check_settings(request.spec, chunk.batch.spec)
            self.task.check_rollout(chunk.batch)
            batches.append(chunk.batch)
            groups = Groups(chunk.batch.group.tolist(), request.samples_per_prompt)
            handles.append(self.rewards.submit(chunk.samples, chunk.prompts, chunk.latents, groups))
            shown.append(Shown.of(chunk.samples, chunk.prompts))
            blocks.append(chunk.blocks)
        rewards = partial(collect_rewards, self.rewards, handles, self.processes, grouped=True)
        metrics = self.engine.take_metrics()
        saved, evaluations = torch.tensor(blocks, dtype=torch.float64).sum(0)
        if evaluations:  # some blocks could have been skipped
            metrics.ratio("rollout/saved_blocks_fraction", saved, evaluations)
        early = None if handles[0].members else partial(self.rewards.first, handles)
        collected = Collected(concat(batches), rewards, Shown.join(shown), metrics, early)
        self.engine.check_quantization(request.spec)
        if self.engine.version in collected.versions():
            self.engine.check_weights()
        return collected

    def prompts(self, step: int) -> PromptBatch:
        """Returns this process's share of the step's prompts."""
        return shard(
            self.sampler.step(step - 1),
            step=step,
            mini_batch_size=self.mini_batch_size,
            rank=self.processes.rank,
            world_size=self.processes.count,
        )

    def engines(self) -> list[Engine]:
        """Returns the engine."""
        return [self.engine]

    def close(self) -> None:
        """Ends the sampling, and closes the engine."""
        self.engine.cancel()
        self._receiver.shutdown(wait=True, cancel_futures=True)
        self.engine.close()

    def _seeds(self, prompts: PromptBatch, refill: int = 0) -> list[int]:
        # By place in the global batch, so the number of processes changes no sample.
        further = (refill,) if refill else ()
        return [
            derive_seed(self.seed, prompts.step, slot, index, "rollout", *further)
            for slot in prompts.slots
            for index in range(self.config.n)
        ]


def _use(device: torch.device) -> None:
    # CUDA's current device belongs to a thread; a new thread starts with the first one.
    if device.type == "cuda":
        torch.cuda.set_device(device)

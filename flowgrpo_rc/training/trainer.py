"""The training loop. One step: prompts -> rollout -> rewards -> old log-probs -> correction ->
advantages -> update.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.advantages import advantage_metrics, estimate, farthest
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.memory import out_of_memory_in
from flowgrpo_rc.distributed.processes import Processes, peak_memory_gib
from flowgrpo_rc.distributed.stopping import StopRequest
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.monitoring.staleness import staleness
from flowgrpo_rc.records.checkpoint import (
    OLDER,
    Checkpoint,
    CheckpointError,
    check_tensors,
    list_checkpoints,
    save_checkpoint,
)
from flowgrpo_rc.records.config import TrainerConfig
from flowgrpo_rc.records.debug_bundle import write_bundle
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.rollout_files import SavedRollout, rollout_path, save_rollout
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import RunLog
from flowgrpo_rc.rewards.collect import record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.config import AlgorithmConfig
from flowgrpo_rc.training.ema import averaged_weights
from flowgrpo_rc.training.modes import Mode
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.update import PolicyUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """What a run is made of; `flowgrpo_rc.build` makes it.

    Attributes:
      trainer: settings of the run itself.
      algorithm: how rewards become advantages.
      samples_per_mini_batch: samples of a mini-batch on one process.
      train_n: samples of each group that are trained on; None for all.
      staleness: how many steps the weights that sample may be behind.
      mode: bypass or decoupled mode.
      suites: what evaluations ask besides the held-out prompts.
    """

    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    samples_per_mini_batch: int
    train_n: int | None
    staleness: int
    processes: Processes
    folder: RunFolder
    task: Task
    source: RolloutSource
    rewards: RewardManager
    mode: Mode
    update: PolicyUpdate
    evaluator: Evaluator
    suites: Sequence[SuiteRunner]
    health: HealthMonitor
    rejected: RejectedSamples
    log: RunLog


class Trainer:
    """Runs the steps that are left of a run.

    Everything random follows from (seed, step, prompt slot, sample), so a resumed run is bit-equal
    to one that was never interrupted.
    """

    def __init__(self, components: Components, resumed: Checkpoint | None) -> None:
        """Goes back to a checkpoint, if there is one, and gives the engine its weights."""
        self._components = components
        self._metrics = MetricBag()
        self._seconds: dict[str, float] = {}
        self._step = 0
        if resumed is not None:
            self._step = resumed.step
            try:
                self._go_back(resumed)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise CheckpointError(
                    f"the checkpoint of step {resumed.step} in {components.folder.root} is not one "
                    f"that this run has written: {type(error).__name__}: {error}"
                ) from error
        components.source.sync_weights(self._sampling_weights(), self._step)

    def _go_back(self, resumed: Checkpoint) -> None:
        components = self._components
        components.update.load(resumed.tensors, resumed.state["update"])
        components.health.load_state_dict(resumed.state["health"])
        components.mode.load(resumed.tensors)
        lora = components.update.lora_state()
        for version, weights in sorted(resumed.older_weights().items()):
            older = check_tensors(f"{OLDER}{version}", weights, lora)
            components.source.sync_weights(older, version)

    def fit(self, stop: StopRequest) -> str | None:
        """Trains to the end, or until `stop` asks.

        Returns:
          Why it stopped early, or None if the run is complete.
        """
        components = self._components
        total = components.trainer.total_training_steps
        if self._step == 0 and components.trainer.val_before_train:
            self._evaluate()
            self._finish_step()
        while self._step < total:
            self.train_step(self._step + 1)
            if self._due(components.trainer.test_freq):
                self._evaluate()
            self._finish_step()
            reason = stop.reason()
            stopping = components.processes.any(reason is not None) and self._step < total
            if stopping or self._due(components.trainer.save_freq):
                self._save()
            if stopping:
                return reason or "another process was asked to stop"
        return None

    def train_step(self, step: int) -> None:
        """Takes one step (the first is 1), from its prompts to the synchronised engine."""
        components = self._components
        self._step = step
        with self._timed("step"):
            with self._timed("rollout"):
                collected = components.source.collect(step)
                where = f"the end of the rollout of step {step}"
                components.processes.meet(where, components.trainer.timeout_s)
            observed = components.task.observe(collected.batch, collected.shown, step)
            self._metrics.merge(observed)
            if collected.metrics is not None:
                self._metrics.merge(collected.metrics)
            if components.staleness > 0:
                self._metrics.merge(staleness(collected.batch.policy_version, step))
            with self._timed("old_log_prob"):
                batch = components.mode.begin(collected.batch, step)
            with self._timed("reward_wait"):
                rewards = collected.rewards()
                # Here, since it waits for the rewards of the other processes.
                advantages = self._advantages(batch, rewards)
            record_rewards(self._metrics, rewards, prefix="reward", total="mean")
            if components.trainer.save_rollouts:
                self._save_rollout(collected.batch, rewards)
            batch = batch.replace(
                advantages=advantages.float().unsqueeze(1).expand(-1, batch.num_steps)
            )
            trained = self._chosen(advantages, batch)
            with self._timed("update"):
                self._update(trained)
            components.mode.finish(self._metrics)
            with self._timed("sync_weights"):
                components.source.sync_weights(self._sampling_weights(), step)
            self._note_decisions(collected, rewards)
        num_samples = len(batch) * components.processes.count
        speed = torch.tensor(num_samples / self._seconds["step"])
        self._metrics.min("perf/samples_per_second", speed)

    def _sampling_weights(self) -> Mapping[str, torch.Tensor]:
        return self._components.mode.sampling_weights(self._components.update.lora_state())

    def _save_rollout(self, batch: Batch, rewards: Rewards) -> None:
        processes = self._components.processes
        folder = self._components.folder.rollouts
        path = rollout_path(folder, self._step, processes.rank, processes.count)
        save_rollout(path, SavedRollout(batch, rewards, self._components.task.origin()))

    def _advantages(self, batch: Batch, rewards: Rewards) -> torch.Tensor:
        """Returns the advantage of each sample, float64 [B]."""
        algorithm = self._components.algorithm
        device = batch.group.device
        valid = rewards.valid.to(device)
        if algorithm.rollout_correction.excludes_rejected:
            excluded = batch.wholly_rejected()
            self._metrics.mean("rollout_corr/excluded_fraction", excluded.double())
            valid = valid & ~excluded
        # A saved rollout need not have each reward by itself, and only gdpo reads them.
        weights = self._components.rewards.weights if algorithm.adv_estimator == "gdpo" else {}
        found = estimate(
            algorithm.adv_estimator,
            rewards.total.to(device),
            [rewards.parts[name].to(device) for name in weights],
            list(weights.values()),
            batch.group,
            valid,
            norm_by_std=algorithm.norm_by_std,
            global_std=algorithm.norm_by_global_std,
            all_reduce=self._components.processes.sum,
        )
        self._metrics.merge(advantage_metrics(found, valid))
        return found.values

    def _chosen(self, advantages: torch.Tensor, batch: Batch) -> Batch:
        """Returns the samples that are trained on, by their advantages, [B]."""
        size = self._components.train_n
        if size is None:  # the same tensors, not copies
            return batch
        rows = farthest(advantages, batch.group, size)
        squares = advantages**2
        self._metrics.ratio("advantages/trained_fraction", squares[rows], squares)
        return batch.select(rows)

    def _update(self, batch: Batch) -> None:
        components = self._components
        try:
            metrics = components.update.run(batch, components.samples_per_mini_batch)
        except FloatingPointError as error:
            raise self._explained(error, batch) from error
        self._metrics.merge(metrics, "actor")

    def _explained(self, error: FloatingPointError, batch: Batch) -> FloatingPointError:
        """Writes down what the update was given; returns the error with the step and the way on."""
        components = self._components
        name = f"step_{self._step:06d}_process_{components.processes.rank}.json"
        bundle = components.folder.debug / name
        try:
            write_bundle(bundle, self._step, batch, components.update.tensors())
            told = f"samples, seeds and norms are in {bundle}"
        except OSError as refused:
            told = f"samples, seeds and norms could not be written ({refused})"
        checkpoints = list_checkpoints(components.folder.checkpoints)
        newest = checkpoints[-1].name if checkpoints else "none"
        return type(error)(
            f"step {self._step}: {error}. Nothing of it was saved: the last good checkpoint is "
            f"{newest}, and the same command goes on from it. A lower actor.optim.lr or "
            f"actor.optim.clip_grad may help; {told}"
        )

    def _note_decisions(self, collected: Collected, rewards: Rewards) -> None:
        """Writes the rejected samples of all processes down."""
        components = self._components
        processes = components.processes
        rows = []
        with components.log.spared("rejected samples"):
            rows = components.rejected.rows(
                self._step,
                components.mode.decisions.take(),
                collected.batch,
                collected.shown,
                rewards,
                partial(components.task.policy.cell_names, collected.batch),
                components.mode.auto_bands,
            )
        # All processes get here, whether or not they could write their pictures.
        texts = processes.texts_of_all([json.dumps(rows)], processes.rank, processes.count)
        if processes.is_main:
            components.log.rejected(self._step, [row for text in texts for row in json.loads(text)])

    def _evaluate(self) -> None:
        components = self._components
        update = components.update
        with self._timed("evaluation"), averaged_weights(update.ema, update.parameters):
            evaluation = components.evaluator.run(components.processes)
        self._metrics.merge(evaluation.metrics)
        for suite in components.suites:
            with self._timed("suites"), averaged_weights(update.ema, update.parameters):
                self._metrics.merge(suite.run(components.processes).metrics())
        if components.processes.is_main:
            stem = components.folder.samples_stem(self._step)
            draw = partial(
                components.task.save_samples,
                stem,
                evaluation.samples,
                evaluation.prompts,
                evaluation.scores,
            )
            components.log.image(self._step, "val/samples", draw)

    def _finish_step(self) -> None:
        """Reduces the step's metrics, with one host transfer, and writes them down."""
        components = self._components
        processes = components.processes
        for phase, seconds in self._seconds.items():
            self._metrics.max(f"timing_s/{phase}", torch.tensor(seconds))
        memory = torch.tensor(peak_memory_gib(processes.device))
        self._metrics.max("perf/peak_memory_gib", memory)
        row = self._metrics.compute(processes.sum, processes.max, processes.device)
        self._metrics = MetricBag()
        self._seconds = {}
        row |= components.health.compare(row)
        warnings = components.health.update(self._step, row)
        if processes.is_main:
            components.log.write(self._step, row, warnings)

    def _save(self) -> None:
        """Writes a checkpoint; its seconds stand in the next row."""
        components = self._components
        processes = components.processes
        folder = components.folder.checkpoints
        with self._timed("checkpoint"):
            if processes.is_main:
                state: Mapping[str, Any] = {
                    "update": components.update.state(),
                    "health": components.health.state_dict(),
                }
                older = components.source.older_weights()
                tensors = {
                    **components.update.tensors(),
                    **{f"{OLDER}{step}": weights for step, weights in older.items()},
                    **components.mode.tensors(),
                }
                checkpoint = Checkpoint(step=self._step, tensors=tensors, state=state)
                keep = components.trainer.max_checkpoints_to_keep
                save_checkpoint(folder, checkpoint, keep=keep)
            processes.wait()

    def _due(self, frequency: int) -> bool:
        """Returns whether this is one of every `frequency` steps, or the last.

        0: only the last; -1: none.
        """
        at_end = self._step == self._components.trainer.total_training_steps
        return (at_end and frequency >= 0) or (frequency > 0 and self._step % frequency == 0)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with out_of_memory_in(phase):
            yield
        if self._components.processes.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed

"""The training loop. One step: prompts -> rollout -> rewards -> old log-probs -> correction ->
advantages -> update.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.advantages import group_decoupled, group_relative
from flowgrpo_rc.core.metrics import MetricBag, std_from_moments
from flowgrpo_rc.correction.api import apply_bypass_mode
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.decisions import Decisions
from flowgrpo_rc.monitoring.health import BYPASS_PREFIX, DECOUPLED_PREFIX, HealthMonitor
from flowgrpo_rc.monitoring.histograms import Counts, histograms
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.rollout_files import SavedRollout, rollout_path, save_rollout
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.trackers import Trackers
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.ema import averaged_weights
from flowgrpo_rc.training.evaluation import Evaluator, record_rewards
from flowgrpo_rc.training.old_policy import OldPolicy
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.stopping import StopRequest
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.update import PolicyUpdate

if TYPE_CHECKING:
    from flowgrpo_rc.config.tree import Config

_OLDER = "lora_step_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """What a run is made of; `flowgrpo_rc.build` builds it. old_policy: in decoupled mode."""

    config: Config
    processes: Processes
    folder: RunFolder
    task: Task
    source: RolloutSource
    rewards: RewardManager
    floor: MismatchMonitor
    observations: Decisions
    rejected: RejectedSamples
    update: PolicyUpdate
    evaluator: Evaluator
    health: HealthMonitor
    console: Console
    trackers: Trackers
    auto_bands: AutoBands | None = None
    old_policy: OldPolicy | None = None


class Trainer:
    """Runs the steps that are left. Everything random follows from (seed, step, prompt slot,
    sample).
    """

    def __init__(self, parts: Components, resumed: Checkpoint | None) -> None:
        self.parts = parts
        self._bag = MetricBag()
        self._seconds: dict[str, float] = {}
        self._rows = MetricsFile(parts.folder.metrics)
        self._histogram_rows = MetricsFile(parts.folder.histograms)
        self._health_rows = MetricsFile(parts.folder.health)
        self._histograms: dict[str, Counts] = {}
        self._step = 0
        if resumed is not None:
            self._step = resumed.step
            parts.update.load(resumed.tensors, resumed.state["update"])
            parts.health.load_state_dict(resumed.state["health"])
            if parts.auto_bands is not None:
                parts.auto_bands.load(resumed.tensors["auto_bands"])
            parts.floor.load(resumed.tensors.get("noise_floor", {}))
            for version, weights in sorted(older_weights(resumed).items()):
                parts.source.sync_weights(weights, version)
        parts.source.sync_weights(parts.update.lora_state(), self._step)

    def fit(self, stop: StopRequest) -> str | None:
        """Train to the end, or until `stop` asks; returns its reason, or None if the run is
        complete.
        """
        total = self.parts.config.trainer.total_training_steps
        if self._step == 0:
            self._evaluate()
            self._finish_step()
        while self._step < total:
            self.train_step(self._step + 1)
            if self._due(self.parts.config.trainer.test_freq):
                self._evaluate()
            self._finish_step()
            reason = stop.reason()
            stopping = self.parts.processes.any(reason is not None) and self._step < total
            if stopping or self._due(self.parts.config.trainer.save_freq):
                self._save()
            if stopping:
                return reason or "another process was asked to stop"
        return None

    def train_step(self, step: int) -> None:
        """One step (the first is 1), from its prompts to the synchronised engine."""
        self._step = step
        with self._timed("step"):
            with self._timed("rollout"):
                collected = self.parts.source.collect(step)
            batch = collected.batch
            self._bag.merge(self.parts.task.observe(batch))
            if self.parts.config.rollout.staleness > 0:
                self._bag.merge(staleness(collected, step))
            with self._timed("old_log_prob"):
                self.parts.floor.expect(batch, step)
                batch = self._old_log_probs(batch)
            with self._timed("reward_wait"):
                rewards = collected.rewards()
            record_rewards(self._bag, rewards, prefix="reward", total="mean")
            if self.parts.config.trainer.save_rollouts:
                self._save_rollout(collected.batch, rewards)
            batch = self._advantages(batch, rewards)
            with self._timed("update"):
                samples = self.parts.config.samples_per_mini_batch(self.parts.processes.count)
                self._bag.merge(self.parts.update.run(batch, samples), "actor")
            if self.parts.old_policy is not None:
                self._bag.merge(self.parts.old_policy.finish(), "rollout_corr")
            bypass = self.parts.config.algorithm.rollout_correction.bypass_mode
            prefix = (BYPASS_PREFIX if bypass else DECOUPLED_PREFIX).removesuffix("/")
            self._bag.replace(self.parts.floor.finish(), prefix)
            with self._timed("sync_weights"):
                self.parts.source.sync_weights(self.parts.update.lora_state(), self._step)
            self._note_decisions(collected, rewards)
        num_samples = len(batch) * self.parts.processes.count
        self._bag.min("perf/samples_per_second", torch.tensor(num_samples / self._seconds["step"]))

    def _old_log_probs(self, batch: Batch) -> Batch:
        """Bypass: old := rollout. Decoupled: the training graph, now or in the update, and the
        correction with it.
        """
        old = self.parts.old_policy
        return apply_bypass_mode(batch) if old is None else old.before_rewards(batch)

    def _save_rollout(self, batch: Batch, rewards: Rewards) -> None:
        processes = self.parts.processes
        path = rollout_path(self.parts.folder.rollouts, self._step, processes.rank, processes.count)
        save_rollout(path, SavedRollout(batch, rewards, self.parts.task.origin()))

    def _advantages(self, batch: Batch, rewards: Rewards) -> Batch:
        algorithm = self.parts.config.algorithm
        device = batch.group.device
        total, valid = rewards.total.to(device), rewards.valid.to(device)
        if algorithm.rollout_correction.excludes_rejected:
            excluded = wholly_rejected(batch)
            self._bag.mean("rollout_corr/excluded_fraction", excluded.double())
            valid = valid & ~excluded
        if algorithm.adv_estimator == "gdpo":
            weights = self.parts.rewards.weights
            terms = [rewards.parts[name].to(device) for name in weights]
            found = group_decoupled(
                terms,
                list(weights.values()),
                batch.group,
                valid,
                all_reduce=self.parts.processes.sum,
            )
        else:
            found = group_relative(
                total,
                batch.group,
                valid,
                norm_by_std=algorithm.norm_by_std,
                global_std=algorithm.norm_by_global_std,
                leave_one_out=algorithm.adv_estimator == "rloo",
                all_reduce=self.parts.processes.sum,
            )
        bag = self._bag
        bag.mean("zero_std_ratio", found.zero_std.double())
        bag.mean("advantages/mean", found.values, valid)
        bag.mean("advantages/_square", found.values**2, valid)
        bag.max("advantages/max", found.values, valid)
        bag.min("advantages/min", found.values, valid)
        bag.derive("advantages/std", ("advantages/mean", "advantages/_square"), std_from_moments)
        return batch.replace(
            advantages=found.values.float().unsqueeze(1).expand(-1, batch.num_steps)
        )

    def _note_decisions(self, collected: Collected, rewards: Rewards) -> None:
        """Histograms of all processes, and the rejected samples of this one."""
        parts, seen = self.parts, self.parts.observations.take()
        self._histograms = histograms(seen, parts.processes.sum)
        names = partial(parts.task.policy.cell_names, collected.batch)
        image = parts.rejected.write(
            self._step, seen, collected.batch, collected.shown, rewards, names
        )
        if image is not None:
            parts.trackers.log_image(self._step, "rejected/samples", image)

    def _evaluate(self) -> None:
        parts = self.parts
        with self._timed("evaluation"), averaged_weights(parts.update.ema, parts.update.parameters):
            evaluation = parts.evaluator.run(parts.processes)
        self._bag.merge(evaluation.metrics)
        if parts.processes.is_main:
            stem = parts.folder.samples_stem(self._step)
            image = parts.task.save_samples(
                stem, evaluation.samples, evaluation.prompts, evaluation.scores
            )
            if image is not None:
                parts.trackers.log_image(self._step, "val/samples", image)

    def _finish_step(self) -> None:
        """Reduce the step's metrics, with one host transfer, and write them down."""
        parts = self.parts
        for phase, seconds in self._seconds.items():
            self._bag.max(f"timing_s/{phase}", torch.tensor(seconds))
        self._bag.max("perf/peak_memory_gib", torch.tensor(peak_memory_gib(parts.processes.device)))
        row = self._bag.compute(parts.processes.sum, parts.processes.max, parts.processes.device)
        self._bag, self._seconds = MetricBag(), {}
        found, self._histograms = self._histograms, {}
        warnings = parts.health.update(self._step, row)
        if not parts.processes.is_main:
            return
        self._rows.append(self._step, row)
        if found:
            self._histogram_rows.append(self._step, found)
            parts.trackers.log_histograms(self._step, found)
        parts.trackers.log(self._step, row)
        parts.console.step(self._step, row)
        for warning in warnings:
            self._health_rows.append(self._step, {"message": warning})
            parts.console.warning(warning)
            parts.trackers.alert(self._step, warning)

    def _save(self) -> None:
        """Write a checkpoint; its seconds stand in the next row."""
        parts = self.parts
        with self._timed("checkpoint"):
            if parts.processes.is_main:
                state: Mapping[str, Any] = {
                    "update": parts.update.state(),
                    "health": parts.health.state_dict(),
                }
                older = {
                    f"{_OLDER}{step}": weights
                    for step, weights in parts.source.older_weights().items()
                }
                tensors = parts.update.tensors() | older
                if parts.auto_bands is not None:
                    tensors["auto_bands"] = parts.auto_bands.tensors()
                if floor := parts.floor.tensors():
                    tensors["noise_floor"] = floor
                checkpoint = Checkpoint(step=self._step, tensors=tensors, state=state)
                keep = parts.config.trainer.max_checkpoints_to_keep
                save_checkpoint(parts.folder.checkpoints, checkpoint, keep=keep)
            parts.processes.wait()

    def _due(self, frequency: int) -> bool:
        """Every `frequency` steps (0: never) and at the last one."""
        at_end = self._step == self.parts.config.trainer.total_training_steps
        return at_end or (frequency > 0 and self._step % frequency == 0)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.parts.processes.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start


def older_weights(checkpoint: Checkpoint) -> dict[int, Mapping[str, torch.Tensor]]:
    """What the checkpoint holds of `RolloutSource.older_weights`."""
    stems = {
        int(stem.removeprefix(_OLDER)): stem
        for stem in checkpoint.tensors
        if stem.startswith(_OLDER)
    }
    return {step: checkpoint.tensors[stem] for step, stem in stems.items()}


def staleness(collected: Collected, step: int) -> MetricBag:
    """How many updates' steps the weights that sampled a step's batch were behind, and which they
    were.
    """
    version, bag = collected.batch.policy_version, MetricBag()
    behind = step - 1 - version
    bag.mean("rollout/staleness_mean", behind)
    bag.max("rollout/staleness_max", behind)
    bag.min("rollout/policy_version_min", version)
    bag.max("rollout/policy_version_max", version)
    bag.sum("rollout/dropped_batches", torch.tensor(collected.dropped))
    return bag


def wholly_rejected(batch: Batch) -> torch.Tensor:
    """[B] bool: samples that have steps, all of which the correction rejected; they must not shift
    a group's mean.
    """
    if batch.rejection_mask is None:
        return torch.zeros_like(batch.group, dtype=torch.bool)
    return batch.valid.any(1) & ~(batch.valid & batch.rejection_mask).any(1)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: of the device for CUDA, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)

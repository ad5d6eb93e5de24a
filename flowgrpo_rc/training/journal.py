"""What a run writes down of its steps: metrics, warnings, rejected samples, rollouts, failures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.algorithm import Algorithm
from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes, gpu_memory_gib, peak_memory_gib
from flowgrpo_rc.evaluation.held_out import HeldOutScores
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.checkpoint import list_checkpoints
from flowgrpo_rc.records.debug_bundle import write_bundle
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.rollout_files import SavedRollout, rollout_path, save_rollout
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import RunLog
from flowgrpo_rc.training.sources.source import Collected
from flowgrpo_rc.training.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Journal:
    """Writes down what a step was, in the run's folder and where its log goes."""

    folder: RunFolder
    log: RunLog
    health: HealthMonitor
    rejected: RejectedSamples
    processes: Processes
    best: BestEvaluation

    def rollout(self, step: int, saved: SavedRollout) -> None:
        """Keeps this process's trajectories, for `data.replay_dir` of another run."""
        processes = self.processes
        path = rollout_path(self.folder.rollouts, step, processes.rank, processes.count)
        save_rollout(path, saved)

    def decisions(
        self,
        step: int,
        algorithm: Algorithm[Batch],
        collected: Collected,
        rewards: Rewards,
        cell_names: Callable[[], Sequence[str]],
    ) -> None:
        """Writes the rejected samples of all processes down."""
        if algorithm.decisions is None:
            return
        rows = self.rejected.rows(
            algorithm.decisions.take(),
            collected.batch,
            collected.shown,
            rewards,
            cell_names,
            algorithm.auto_bands,
        )
        rows = self.processes.gather_objects(rows)
        if self.processes.is_main:
            self.log.rejected(step, rows)

    def held_out(
        self, step: int, task: Task, held_out: HeldOutScores, *, evaluated: bool = True
    ) -> None:
        """Saves some of the held-out samples with their scores, on the main process."""
        if self.processes.is_main:
            stem = self.folder.samples_stem(step, evaluated=evaluated)
            columns = (held_out.samples, held_out.prompts, held_out.scores)
            draw = partial(task.save_samples, stem, *columns)
            self.log.image(step, "val/samples", draw)

    def finish(self, step: int, metrics: MetricBag) -> bool:
        """Reduces the step's metrics, with one host transfer, and writes them down.

        Returns whether the held-out reward is better than before, the same on all processes.
        """
        processes = self.processes
        device = processes.device
        metrics.max("perf/peak_memory_gib", torch.tensor(peak_memory_gib(device)))
        if device.type == "cuda":
            reserved, used = gpu_memory_gib(device)
            metrics.max("perf/reserved_memory_gib", torch.tensor(reserved))
            metrics.max("perf/device_memory_gib", torch.tensor(used))
        row = metrics.compute(processes.sum, processes.max, device)
        row |= self.health.compare(row)
        warnings = self.health.update(step, row)
        if processes.is_main:
            self.log.write(step, row, warnings)
        return self.best.see(step, row)

    def explained(
        self,
        step: int,
        error: FloatingPointError,
        batch: Batch,
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> FloatingPointError:
        """Writes down what an update was given; returns its error with step and way on."""
        name = f"step_{step:06d}_process_{self.processes.rank}.json"
        bundle = self.folder.debug / name
        try:
            write_bundle(bundle, step, batch, tensors)
            where = f"samples, seeds and norms are in {bundle}"
        except OSError as refused:
            where = f"samples, seeds and norms could not be written ({refused})"
        checkpoints = list_checkpoints(self.folder.checkpoints)
        newest = checkpoints[-1].name if checkpoints else "none"
        return type(error)(
            f"step {step}: {error}. Nothing of it was saved: the last good checkpoint is "
            f"{newest}, and the same command goes on from it. A lower actor.optim.lr or "
            f"actor.optim.clip_grad may help; {where}"
        )

"""The training loop: prompts, rollout, rewards, old log-probs, correction, advantages, update."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.algorithms.algorithm import Algorithm
from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.memory import out_of_memory_in
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.stopping import StopRequest
from flowgrpo_rc.evaluation.held_out import NUM_FOLLOWED, Evaluator, HeldOutScores
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner
from flowgrpo_rc.records.checkpoint import Checkpoint
from flowgrpo_rc.records.config import TrainerConfig
from flowgrpo_rc.records.rollout_files import SavedRollout
from flowgrpo_rc.rewards.collect import record_rewards
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.journal import Journal
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.state import RunState
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.update import PolicyUpdate


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Runs the steps that are left of a run; `flowgrpo_rc.assembly.run` makes it.

    Everything random follows from (seed, step, prompt slot, sample), so a resumed run is bit-equal
    to one that was never interrupted. `mini_batch_size` counts samples of one process.
    """

    config: TrainerConfig
    processes: Processes
    task: Task
    source: RolloutSource
    rewards: RewardManager
    algorithm: Algorithm[Any]
    advantages: AdvantageEstimator
    update: PolicyUpdate
    mini_batch_size: int
    may_be_stale: bool
    evaluator: Evaluator
    suites: Sequence[SuiteRunner]
    state: RunState
    journal: Journal
    export: Callable[[int, Mapping[str, Tensor]], None] | None = None  # of the weights of a step
    _metrics: MetricBag = field(default_factory=MetricBag, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)

    def start(self, resumed: Checkpoint | None) -> None:
        """Goes back to a checkpoint, if there is one, and gives the engine its weights."""
        if resumed is not None:
            self._step = resumed.step
            self.state.load(resumed)
        self.state.sync(self._step)

    def fit(self, stop: StopRequest) -> str | None:
        """Trains to the end, until evaluations get no better, or until `stop` asks.

        Returns why it stopped early, or None.
        """
        total = self.config.total_training_steps
        if self._step == 0 and self.config.val_before_train:
            self._evaluate()
            self._finish_step()
        elif self._step == 0 and self.config.sample_freq:
            self._draw()
        best = self.journal.best
        patience = self.config.patience
        while self._step < total and not best.over(patience):
            self.train_step(self._step + 1)
            if self._due(self.config.test_freq):
                self._evaluate()
            elif self._is_each(self.config.sample_freq):
                self._draw()
            better = self._finish_step()
            reason = stop.reason()
            ending = self._step == total or best.over(patience)
            # All processes have to stop after the same step, whichever of them was asked.
            stopping = self.processes.any(reason is not None) and not ending
            if stopping or ending or better or self._due(self.config.save_freq):
                with self._timed("checkpoint"):  # its seconds stand in the next row
                    self.state.save(self._step, spare=best.step)
            if self._is_each(self.config.export_freq):
                self._export()
            if stopping:
                return reason or "another process was asked to stop"
        return None

    def train_step(self, step: int) -> None:
        """Takes one step (the first is 1), from its prompts to the synchronised engine."""
        self._step = step
        with self._timed("step"):
            with self._timed("rollout"):
                collected = self.source.collect(step)
                where = f"the end of the rollout of step {step}"
                self.processes.meet(where, self.config.timeout_s)
            self._metrics.merge(self.task.observe(collected.batch, collected.shown, step))
            if collected.metrics is not None:
                self._metrics.merge(collected.metrics)
            if self.may_be_stale:
                self._metrics.merge(collected.staleness(step))
            if collected.teaches:
                self._learn(collected, step)
            else:
                self._record(collected, collected.rewards(), step)
            with self._timed("sync_weights"):
                self.state.sync(step)
        num_samples = len(collected.batch) * self.processes.count
        speed = torch.tensor(num_samples / self._seconds["step"])
        self._metrics.min("perf/samples_per_second", speed)

    def _learn(self, collected: Collected, step: int) -> None:
        # Before the rewards are waited for: they are scored while this computes.
        with self._timed("old_log_prob"):
            batch = self._begin(collected.batch, step)
        early = collected.first if self.advantages.by_group else None
        if early is not None:
            with self._timed("update"):
                self._update(batch, early)
        with self._timed("reward_wait"):
            rewards = collected.rewards()
            advantages = collected.advantages
            if advantages is None:  # here, since it waits for the rewards of the other processes
                advantages = self.advantages.of(batch, rewards, self._metrics)
        self._record(collected, rewards, step)
        trained = self.advantages.chosen(advantages, batch, self._metrics)
        if early is None:
            with self._timed("update"):
                self._update(trained)
        self.algorithm.finish(self._metrics)
        names = partial(self.task.policy.cell_names, collected.batch)
        self.journal.decisions(step, self.algorithm, collected, rewards, names)

    def _record(self, collected: Collected, rewards: Rewards, step: int) -> None:
        """Measures rewards, and saves the rollout if asked to; a replay needs each step."""
        record_rewards(self._metrics, rewards, prefix="reward", total="mean")
        if self.config.save_rollouts:
            saved = SavedRollout(collected.batch, rewards, self.task.origin())
            self.journal.rollout(step, saved)

    def close(self) -> None:
        """Ends what samples, scores and tells of the run."""
        self.rewards.close()
        for suite in self.suites:
            suite.close()
        self.source.close()
        self.journal.log.trackers.finish()

    def _begin(self, batch: Batch, step: int) -> Batch:
        """Returns the batch with what the algorithm knows of it before rewards.

        It sees the rows in the update's order, so that its forwards have the update's shapes.
        """
        order = self.task.policy.order(batch, self.mini_batch_size)
        if order is None:
            return self.algorithm.begin(batch, step)
        return self.algorithm.begin(batch.select(order), step).select(order.argsort())

    def _update(self, batch: Batch, early: Callable[[int], Rewards] | None = None) -> None:
        """Trains; with `early` each mini-batch waits for the rewards of its own groups alone."""
        order = self.task.policy.order(batch, self.mini_batch_size)
        ordered = batch if order is None else batch.select(order)
        advantages = torch.zeros(batch.step_mask.shape, device=batch.group.device)

        def ready(count: int) -> None:
            assert early is not None
            with self._timed("reward_wait"):
                # Groups without rewards only lack theirs: those of the others have the same bits.
                known = self.advantages.of(batch, early(count), MetricBag()).float()
            known = known if order is None else known[order]
            advantages.copy_(known.unsqueeze(1))  # mini-batches are views of it

        if early is not None:
            ordered = ordered.replace(advantages=advantages)
        try:
            metrics = self.update.run(ordered, self.mini_batch_size, ready if early else None)
            if self._step == self.config.total_training_steps:
                self.update.check_trained()
        except FloatingPointError as error:
            left = self.update.tensors()
            raise self.journal.explained(self._step, error, ordered, left) from error
        self._metrics.merge(metrics, "actor")

    def _evaluate(self) -> None:
        """Scores held-out samples and asks the suites, with the average of the LoRA."""
        self._metrics.merge(self._draw(None).metrics)
        for suite in self.suites:
            with self._timed("suites"), self.update.averaged():
                self._metrics.merge(suite.run(self.processes).metrics())

    def _draw(self, first: int | None = NUM_FOLLOWED) -> HeldOutScores:
        """Draws the held-out samples that the report's strip shows, or all for an evaluation."""
        with self._timed("evaluation"), self.update.averaged():
            scores = self.evaluator.run(self.processes, first=first)
            self.journal.held_out(self._step, self.task, scores, evaluated=first is None)
        return scores

    def _export(self) -> None:
        """Exports the weights that evaluations score, on the main process."""
        if self.processes.is_main and self.export is not None:
            tensors = self.update.tensors()
            with self.journal.log.spared("the LoRA in lora/step_N"):
                self.export(self._step, tensors.get("ema", tensors["lora"]))

    def _finish_step(self) -> bool:
        for phase, seconds in self._seconds.items():
            self._metrics.max(f"timing_s/{phase}", torch.tensor(seconds))
        metrics = self._metrics
        self._metrics = MetricBag()
        self._seconds = {}
        return self.journal.finish(self._step, metrics)

    def _due(self, frequency: int) -> bool:
        """Returns whether this is one of every `frequency` steps, or the last; -1: never."""
        at_end = self._step == self.config.total_training_steps
        return (at_end and frequency >= 0) or self._is_each(frequency)

    def _is_each(self, frequency: int) -> bool:
        """Returns whether this is one of every `frequency` steps; 0 or less: never."""
        return frequency > 0 and self._step % frequency == 0

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with out_of_memory_in(phase):
            yield
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed

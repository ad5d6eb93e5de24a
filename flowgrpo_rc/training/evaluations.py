"""Evaluations during a run, with the average of the LoRA if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import RunLog
from flowgrpo_rc.training.ema import averaged_weights
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.update import PolicyUpdate


class Evaluations:
    """Scores held-out samples and asks suites, with the weights of an update.

    Attributes:
      suites: what evaluations ask besides the held-out prompts.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        suites: Sequence[SuiteRunner],
        task: Task,
        update: PolicyUpdate,
        processes: Processes,
        folder: RunFolder,
        log: RunLog,
    ) -> None:
        """Takes what is asked, of which weights, and where pictures go."""
        self.suites = suites
        self._evaluator = evaluator
        self._task = task
        self._update = update
        self._processes = processes
        self._folder = folder
        self._log = log

    def held_out(self, step: int) -> MetricBag:
        """Scores samples of the held-out prompts, and saves some of them."""
        with averaged_weights(self._update.ema, self._update.parameters):
            found = self._evaluator.run(self._processes)
        if self._processes.is_main:
            stem = self._folder.samples_stem(step)
            draw = partial(
                self._task.save_samples, stem, found.samples, found.prompts, found.scores
            )
            self._log.image(step, "val/samples", draw)
        return found.metrics

    def ask(self, suite: SuiteRunner) -> MetricBag:
        """Asks the questions of a suite."""
        with averaged_weights(self._update.ema, self._update.parameters):
            return suite.run(self._processes).metrics()

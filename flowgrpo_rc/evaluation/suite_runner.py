"""Asks a suite of the base model and of the trained one, from the same noises.

Shapes: P prompts, S samples of each.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import derive_seed
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import NUM_SHOWN, HeldOutSampler, Questions, Sample
from flowgrpo_rc.evaluation.intervals import PolicyComparison, compare
from flowgrpo_rc.evaluation.suite import Suite, SuiteProtocol
from flowgrpo_rc.rewards.manager import RewardManager

TOTAL = "reward"


class SuiteScores(NamedTuple):
    """Holds what one policy got in a suite."""

    columns: Mapping[str, np.ndarray]  # `reward`, `term` and `term/part`, [P, S], NaN if unscored
    shown: Sequence[Sample]  # the first sample of the first prompts


class SuiteResult(NamedTuple):
    """Holds what the base model and the one with its LoRA got in a suite."""

    name: str
    base: SuiteScores
    tuned: SuiteScores
    comparisons: Mapping[str, PolicyComparison]  # by column of the scores
    groups: Mapping[str, PolicyComparison]  # of the weighted sum, by value of the suite's `by`
    protocol: SuiteProtocol

    def metrics(self) -> MetricBag:
        """Returns the metrics of a step, the same on all processes."""
        change = self.comparisons[TOTAL].change
        values = {name: scores.tuned.mean for name, scores in self.comparisons.items()} | {
            "change": change.mean,
            "change_low": change.low,
            "change_high": change.high,
            "failed_fraction": float(np.isnan(self.tuned.columns[TOTAL]).mean()),
        }
        metrics = MetricBag()
        for name, value in values.items():
            metrics.mean(f"suite/{self.name}/{name}", torch.tensor(value, dtype=torch.float64))
        return metrics


class SuiteRunner:
    """Asks a suite of a model again and again; of its base, which does not change, only once.

    It draws nothing from the randomness of the training, and keeps no state: a run that goes on
    asks the base anew and gets the same answers.
    """

    def __init__(
        self,
        suite: Suite,
        sample: HeldOutSampler,
        base: Callable[[], AbstractContextManager[None]],
        *,
        batch_size: int,
        protocol: SuiteProtocol,
    ) -> None:
        """Loads nothing. `base` makes a context in which `sample` draws from the base model."""
        self._suite = suite
        self._base = base
        self._protocol = protocol
        self._base_scores: SuiteScores | None = None
        # The first sample of every prompt comes first: they are the ones that are shown.
        prompts = [*suite.prompts] * suite.seeds
        seeds = [
            derive_seed(number, "suite", prompt.index)
            for number in range(suite.seeds)
            for prompt in suite.prompts
        ]
        rewards = RewardManager(suite.reward)
        self._questions = Questions(sample, prompts, seeds, rewards, batch_size)

    def run(self, processes: Processes, *, show: bool = False) -> SuiteResult:
        """Scores the present weights, and compares them with the base model.

        All processes call this. `show` keeps samples to be looked at.
        """
        if self._base_scores is None:
            with self._base():
                self._base_scores = self._scores(processes, show=show)
        base = self._base_scores
        tuned = self._scores(processes, show=show)
        before = base.columns
        after = tuned.columns
        columns = {name: compare(before[name], after[name]) for name in after}
        group_of = np.array(self._suite.groups())
        groups = {
            name: compare(before[TOTAL][group_of == name], after[TOTAL][group_of == name])
            for name in dict.fromkeys(group_of.tolist())
        }
        return SuiteResult(self._suite.name, base, tuned, columns, groups, self._protocol)

    def close(self) -> None:
        """Ends the rewards."""
        self._questions.rewards.close()

    def _scores(self, processes: Processes, *, show: bool) -> SuiteScores:
        num_shown = min(NUM_SHOWN, len(self._suite.prompts)) if show else 0
        rewards, shown = self._questions.ask(processes, show=num_shown)
        named = {TOTAL: rewards.total, **rewards.parts}
        rows = torch.stack(list(named.values()), dim=1)
        whole = np.stack(processes.gather_objects(list(rows.numpy())))
        shape = self._suite.seeds, len(self._suite.prompts)
        columns = {name: whole[:, i].reshape(shape).T for i, name in enumerate(named)}
        return SuiteScores(columns, shown)

"""Samples that a cheap rollout has chosen are drawn again as the trainer's policy draws them."""

from dataclasses import dataclass

import torch

from flowgrpo_rc.batch import Rewards
from flowgrpo_rc.core.advantages import farthest
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected, Engine, RolloutSource


@dataclass(eq=False)
class RedrawnSource(RolloutSource):
    """Draws a pool with the rollout's settings, and the samples to train on once more, exactly.

    Those are the `train_n` of each prompt whose advantages are farthest from 0. They start from the
    same noise, and are scored again. Mean and deviation of a group are those of the pool, in which
    their new rewards replace the old ones.
    """

    scouts: EngineSource
    exact: EngineSource
    advantages: AdvantageEstimator
    train_n: int

    def collect(self, step: int) -> Collected:
        """Returns the samples that were drawn again, with their advantages in the pool."""
        pool = self.scouts.collect(step)
        rewards = pool.rewards()
        metrics = pool.metrics or MetricBag()
        first = self.advantages.of(pool.batch, rewards, MetricBag())
        rows = farthest(first, pool.batch.group, self.train_n)
        again = self.exact.redraw(step, rows.tolist())
        scored = again.rewards()
        index = rows.cpu()
        scouted = rewards.select(index)
        both = scored.valid & scouted.valid
        metrics.mean("scouts/reward", rewards.total, rewards.valid)
        metrics.mean("scouts/reward_difference", (scored.total - scouted.total).abs(), both)
        order = torch.arange(len(rewards.total))
        order[index] = len(order) + torch.arange(len(index))  # where the new ones stand in both
        newest = Rewards.join([rewards, scored]).select(order)
        advantages = self.advantages.of(pool.batch, newest, metrics)
        squares = advantages**2
        metrics.ratio("advantages/trained_fraction", squares[rows], squares)
        return Collected(
            again.batch,
            lambda: scored,
            shown=again.shown,
            metrics=metrics,
            advantages=advantages[rows],
        )

    def engines(self) -> list[Engine]:
        """Returns both engines."""
        return [self.scouts.engine, self.exact.engine]

    def close(self) -> None:
        """Closes both engines."""
        self.scouts.close()
        self.exact.close()

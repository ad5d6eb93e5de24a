"""How rewards become advantages, and which samples are trained on.

Legend: B samples, T steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.core.advantages import ESTIMATORS, advantage_metrics, estimate, farthest
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.reduce import AllReduce
from flowgrpo_rc.training.config import AlgorithmConfig


@dataclass(frozen=True, eq=False)
class AdvantageEstimator:
    """Makes advantages of rewards with their weights, and picks `train_n` samples of a group."""

    config: AlgorithmConfig
    weights: Mapping[str, float]
    train_n: int | None
    all_reduce: AllReduce

    @property
    def by_group(self) -> bool:
        """Returns whether a group alone decides on its advantages and on who is trained on."""
        return self.train_n is None and self.config.adv_estimator in ("grpo", "dr_grpo", "rloo")

    def of(self, batch: Batch, rewards: Rewards, metrics: MetricBag) -> Tensor:
        """Returns the advantage of each sample, float64 [B]."""
        device = batch.group.device
        valid = rewards.valid.to(device)
        if self.config.rollout_correction.excludes_rejected:
            excluded = batch.wholly_rejected()
            metrics.mean("rollout_corr/excluded_fraction", excluded.double())
            valid = valid & ~excluded
        # A saved rollout need not have each reward by itself, and only gdpo reads them.
        weights = self.weights if self.config.adv_estimator == "gdpo" else {}
        norm_by_std, global_std = ESTIMATORS[self.config.adv_estimator]
        advantages = estimate(
            self.config.adv_estimator,
            rewards.total.to(device),
            [rewards.parts[name].to(device) for name in weights],
            [*weights.values()],
            batch.group,
            valid,
            norm_by_std=norm_by_std,
            global_std=global_std,
            all_reduce=self.all_reduce,
        )
        metrics.merge(advantage_metrics(advantages, valid, batch.group, batch.ends))
        return advantages.values

    def chosen(self, advantages: Tensor, batch: Batch, metrics: MetricBag) -> Batch:
        """Returns the samples that are trained on, with their advantages, [B, T] fp32."""
        spread = advantages.float().unsqueeze(1).expand(-1, batch.num_steps)
        batch = batch.replace(advantages=spread)
        if self.train_n is None:  # the same tensors, not copies
            return batch
        rows = farthest(advantages, batch.group, self.train_n)
        squares = advantages**2
        metrics.ratio("advantages/trained_fraction", squares[rows], squares)
        return batch.select(rows)

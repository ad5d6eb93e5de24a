"""The mode of a correction, with a monitor of its own, for tests of the update."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from flowgrpo_rc.algorithms.policy_gradient.algorithm import Loss, PolicyGradient
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.modes import make_mode
from flowgrpo_rc.batch import Batch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.base import Policy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate


def mode_of(
    correction: RolloutCorrectionConfig,
    policy: Policy[Any],
    *,
    micro_batch_size: int = 4,
    auto_bands: AutoBands | None = None,
    own_forwards: bool = False,
    keep_means: bool = False,
    clip_ratio: float | None = None,
    terms: Loss | None = None,
) -> PolicyGradient:
    """Makes the mode that `correction` asks for, in one process.

    `terms` computes the loss; None for that of images with the defaults of the configuration.
    """
    terms = terms or DiffusionObjective(LossConfig(rollout_correction=correction)).terms
    processes = Processes(Accelerator(cpu=True))
    names = correction.metric_names
    return make_mode(
        correction,
        own_forwards=own_forwards,
        keep_means=keep_means,
        policy=policy,
        terms=terms,
        processes=processes,
        monitor=MismatchMonitor(policy, processes, clip_ratio=clip_ratio, metric_names=names),
        micro_batch_size=micro_batch_size,
        auto_bands=auto_bands,
    )


def update_of(mode: PolicyGradient, *, lr: float, **actor: Any) -> PolicyUpdate:
    """Makes the update of a mode, with micro-batches of its size."""
    size = mode.micro_batch_size
    config = ActorConfig(ppo_micro_batch_size_per_gpu=size, optim=OptimConfig(lr=lr), **actor)
    return PolicyUpdate(mode, config, mode.processes, total_updates=10)


def iterate(
    update: PolicyUpdate, mode: PolicyGradient, batch: Batch, mini: int
) -> dict[str, float]:
    """Runs one iteration; returns the metrics of the mode and of the update, without `actor/`."""
    updated = update.run(batch, mini)
    metrics = MetricBag()
    mode.finish(metrics)
    found = {name.removeprefix("actor/"): value for name, value in metrics.compute().items()}
    return found | updated.compute()

"""The mode of a correction, with a monitor of its own, for tests of the update."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora

from flowgrpo_rc.algorithms.policy_gradient.algorithm import Loss, PolicyGradient
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.modes import make_mode
from flowgrpo_rc.batch import Batch, DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.base import Policy
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate


def mode_of(
    correction: RolloutCorrectionConfig,
    policy: Policy[Any],
    *,
    terms: Loss | None = None,
    clip_ratio: float | None = None,
    **options: Any,
) -> PolicyGradient:
    """Makes the mode that `correction` asks for, in one process.

    `terms` computes the loss; None for that of images with the defaults of the configuration.
    """
    terms = terms or DiffusionObjective(LossConfig(rollout_correction=correction)).terms
    processes = Processes(Accelerator(cpu=True))
    names = correction.metric_names
    monitor = MismatchMonitor(policy, processes, clip_ratio=clip_ratio, metric_names=names)
    given = {"micro_batch_size": 4, "auto_bands": None, "own_forwards": False, "keep_means": False}
    return make_mode(
        Corrector(correction),
        policy=policy,
        terms=terms,
        processes=processes,
        monitor=monitor,
        **given | options,
    )


def update_of(mode: PolicyGradient, *, lr: float, **actor: Any) -> PolicyUpdate:
    """Makes the update of a mode, with micro-batches of its size."""
    size = mode.micro_batch_size
    config = ActorConfig(ppo_micro_batch_size_per_gpu=size, optim=OptimConfig(lr=lr), **actor)
    return PolicyUpdate(mode, config, mode.processes, total_updates=10)


def make_update(model: FlowModel, actor: ActorConfig) -> tuple[PolicyUpdate, DiffusionBatch]:
    """Makes an update, and four small samples for it."""
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 1.0), WINDOWS["first"])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5]).unsqueeze(1).expand(4, 2)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs, advantages=advantages)
    loss = LossConfig(
        diffusion_loss=DiffusionLossConfig(clip_ratio=1e-3),
        rollout_correction=RolloutCorrectionConfig(),
    )
    size = actor.ppo_micro_batch_size_per_gpu
    terms = DiffusionObjective(loss).terms
    policy = FlowPolicy(model, transformer)
    mode = mode_of(loss.rollout_correction, policy, micro_batch_size=size, terms=terms)
    return PolicyUpdate(mode, actor, mode.processes, total_updates=10), batch


def iterate(
    update: PolicyUpdate, mode: PolicyGradient, batch: Batch, mini: int
) -> dict[str, float]:
    """Runs one iteration; returns the metrics of the mode and of the update, without `actor/`."""
    updated = update.run(batch, mini)
    metrics = MetricBag()
    mode.finish(metrics)
    found = {name.removeprefix("actor/"): value for name, value in metrics.compute().items()}
    return found | updated.compute()

"""A policy update on four small samples."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of

from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.update import PolicyUpdate


def make_update(model: FlowModel, actor: ActorConfig) -> tuple[PolicyUpdate, DiffusionBatch]:
    transformer = trained_lora(model)
    batch, _ = sample_images(model, transformer, make_spec("sde", 1.0), WINDOWS["first"])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5]).unsqueeze(1).expand(4, 2)
    batch = batch.replace(old_log_probs=batch.rollout_log_probs, advantages=advantages)
    loss = LossConfig(
        diffusion_loss=DiffusionLossConfig(clip_ratio=1e-3),
        rollout_correction=RolloutCorrectionConfig(),
    )
    policy = FlowPolicy(model, transformer)
    size = actor.ppo_micro_batch_size_per_gpu
    terms = DiffusionObjective(loss).terms
    mode = mode_of(loss.rollout_correction, policy, micro_batch_size=size, terms=terms)
    processes = Processes(Accelerator(cpu=True))
    return PolicyUpdate(mode, actor, processes, total_updates=10), batch

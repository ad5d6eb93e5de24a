"""Makes the algorithm that the loss belongs to, and what measures the mismatch for it."""

from functools import partial
from typing import Any

import torch

from flowgrpo_rc.algorithms.algorithm import Algorithm
from flowgrpo_rc.algorithms.diffusion_nft.algorithm import ForwardProcess
from flowgrpo_rc.algorithms.diffusion_nft.graph import VelocityGraph
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.modes import make_mode
from flowgrpo_rc.algorithms.policy_gradient.text import TokenObjective
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.auto_clip import AutoClip
from flowgrpo_rc.losses.base import TokenLoss
from flowgrpo_rc.monitoring.expected_mismatch import ENOUGH, LEAST, ExpectedMismatch
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.tasks.task import Task


def make_algorithm(spec: RunSpec, task: Task, processes: Processes) -> Algorithm[Any]:
    """Makes the algorithm that the loss belongs to."""
    config = spec.config
    section = config.actor.diffusion_loss
    micro_batch_size = config.actor.ppo_micro_batch_size_per_gpu
    if spec.forward_loss is not None:
        assert isinstance(task.policy, FlowPolicy)
        return ForwardProcess(
            VelocityGraph(task.policy),
            spec.forward_loss,
            adv_clip_max=section.adv_clip_max,
            micro_batch_size=micro_batch_size,
        )
    objective: TokenObjective | DiffusionObjective
    if isinstance(spec.loss, TokenLoss):
        objective = TokenObjective(spec.loss_config, spec.loss, spec.rules)
    else:
        objective = DiffusionObjective(spec.loss_config, spec.step_loss, spec.rules)
    return make_mode(
        Corrector(config.algorithm.rollout_correction, spec.rules),
        own_forwards=spec.why_recompute is None,
        keep_means=spec.loss_needs_means,
        policy=task.policy,
        terms=objective.terms,
        processes=processes,
        monitor=make_monitor(spec, task, processes),
        micro_batch_size=micro_batch_size,
        auto_bands=make_auto_bands(spec, processes),
        auto_clip=make_auto_clip(spec, processes),
    )


def make_auto_bands(spec: RunSpec, processes: Processes) -> AutoBands | None:
    """Makes the bands of the criteria that have an `auto` threshold; None if there are none."""
    config = spec.config
    bands = () if config.algorithm.rollout_correction.custom_correction else spec.rules.auto
    if not bands:
        return None
    return AutoBands(
        bands,
        config.rollout.pipeline.num_inference_steps,
        processes.device,
        num_mini_batches=config.data.train_batch_size // config.actor.ppo_mini_batch_size,
    )


def make_auto_clip(spec: RunSpec, processes: Processes) -> AutoClip | None:
    """Makes the bound of a loss that follows the mismatch; None if the bound is a number."""
    config = spec.config
    section = config.actor.diffusion_loss
    if spec.is_text or not section.auto:
        return None
    (deviations,) = section.auto.values()
    return AutoClip(
        spec.step_loss,
        deviations,
        centered=bool(config.algorithm.rollout_correction.centered),
        num_steps=config.rollout.pipeline.num_inference_steps,
        device=processes.device,
    )


def make_monitor(spec: RunSpec, task: Task, processes: Processes) -> MismatchMonitor:
    """Makes what measures the mismatch, and what the precisions explain of it for fresh samples."""
    config = spec.config
    expected = None
    size = spec.expected_mismatch
    if size is not None:
        switched = config.trainer.mixed_precision == "no"
        autocast = partial(torch.autocast, processes.device.type, torch.bfloat16, enabled=switched)
        in_bf16 = config.model.dtype == "bf16"
        expected = ExpectedMismatch(
            task.policy,
            task.policy.rounded_otherwise(None if in_bf16 else autocast),
            processes,
            size=size,
            least=LEAST[config.model.kind],
            enough=ENOUGH[config.model.kind],
            micro_batch_size=config.actor.ppo_micro_batch_size_per_gpu,
        )
    return MismatchMonitor(
        task.policy,
        processes,
        clip_ratio=spec.clip_ratio,
        expected=expected,
        metric_names=config.algorithm.rollout_correction.metric_names,
    )

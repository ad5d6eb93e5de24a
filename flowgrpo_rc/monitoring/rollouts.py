"""Facts about a rollout that its log-probs do not show."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.monitoring.conditioning import EVERY, conditioning_error
from flowgrpo_rc.monitoring.noise import observe_noise
from flowgrpo_rc.monitoring.pictures import PictureFacts, observe_pictures


def observe_images(
    model: FlowModel,
    batch: DiffusionBatch,
    prompts: Sequence[Prompt],
    facts: PictureFacts | None,
    step: int,
    *,
    seeded: bool,
) -> MetricBag:
    """Measures what an engine stores, draws and encodes, and its pictures; full names.

    The share of latents that 16 bits hold is 1 if an engine rounds what it stores, and one in
    thousands if not. Prompts are encoded again in step 1 and every `EVERY` steps; samples from
    files have none. `facts` are None if no pictures were decoded.
    """
    metrics = observe_noise(batch, seeded=seeded)
    stored = batch.all_latents[:, -1]
    metrics.mean("rollout/latents_16bit_fraction", (stored == stored.half()).double())
    if prompts and step % EVERY == 1:
        metrics.max("rollout/conditioning_error_max", conditioning_error(model, batch, prompts))
    if facts is not None:
        metrics.merge(observe_pictures(facts, batch.group.cpu()))
    return metrics


def staleness(policy_version: Tensor, step: int) -> MetricBag:
    """Measures how many steps the weights of each sample [B] were behind, and which they were."""
    behind = step - 1 - policy_version  # fresh weights have the version step - 1
    metrics = MetricBag()
    metrics.mean("rollout/staleness_mean", behind)
    metrics.max("rollout/staleness_max", behind)
    metrics.min("rollout/policy_version_min", policy_version)
    metrics.max("rollout/policy_version_max", policy_version)
    return metrics

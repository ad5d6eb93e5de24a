"""Checks that the steps that are trained fit a model whose transformers share the schedule."""

from __future__ import annotations

import logging

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.models.base import FlowModel

logger = logging.getLogger(__name__)


def check_networks(config: Config, model: FlowModel, num_processes: int) -> None:
    """Checks a model with several transformers; others pass.

    Warns of a transformer whose steps are never trained: its LoRA stays without effect.

    Raises:
      ValueError: processes that share the frozen weights would run different transformers.
    """
    if len(model.networks) == 1:
        return
    networks = model.networks_of_steps(config.rollout.spec())
    first, last = _trained(config)
    trained = networks[first:last]
    ranges = f"steps {first} to {last - 1} of {len(networks)}"
    for name in model.networks:
        if name not in trained:
            logger.warning(
                "the LoRA of %s gets no gradient and stays without effect: the trained %s belong "
                "to %s, and %d step(s) of the schedule to %s. Widen "
                "rollout.algo.sde_window_range to train both",
                *(name, ranges, " and ".join(set(trained)), networks.count(name), name),
            )
    sharded = num_processes > 1 and resolve_strategy(config.trainer.strategy) == "fsdp2"
    if sharded and len(set(trained)) > 1 and not _all_train_the_same_steps(config):
        raise ValueError(
            f"trainer.strategy=fsdp2 shares the frozen weights of {' and '.join(model.networks)}, "
            f"and with rollout.algo.window_sharing={config.rollout.algo.window_sharing} processes "
            f"would run different ones at the same time, which hangs: the trained {ranges} lie on "
            "both sides of the boundary. Set rollout.algo.window_sharing=batch, or "
            "trainer.strategy=ddp"
        )


def _trained(config: Config) -> tuple[int, int]:
    """Returns the first step that is trained and the one behind the last."""
    if config.actor.diffusion_loss.forward is not None:
        return 0, config.rollout.pipeline.num_inference_steps
    _, first, last = config.rollout.window()
    return first, last


def _all_train_the_same_steps(config: Config) -> bool:
    """Returns whether all samples of a training step have the same window."""
    if config.actor.diffusion_loss.forward is not None:
        return False
    algo = config.rollout.algo
    size, first, last = config.rollout.window()
    slides = algo.sde_window_interval is not None
    return slides or algo.window_sharing == "batch" or size == last - first

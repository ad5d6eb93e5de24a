"""Checks of settings against each other, with no look at any file."""

import math
from collections.abc import Sequence

import torch

from flowgrpo_rc.losses.base import DIFFUSION_KEY
from flowgrpo_rc.rewards.manager import check_kind
from flowgrpo_rc.spec.rules import check_rules
from flowgrpo_rc.spec.run_spec import RunSpec, shares_evenly

# What a reward may score, by the kind of the model.
SCORED = {"diffusion": ("image", "video", "latent"), "causal_lm": ("text",)}


def check_settings(spec: RunSpec) -> None:
    """Checks all settings against each other, without reading a file."""
    check_kind(spec.rewards, *SCORED[spec.settings.model.kind])
    _check_sizes(spec)
    check_rules(spec)
    _check_bounds_of_steps(spec)


def _check_sizes(spec: RunSpec) -> None:
    """A step is whole mini-batches, and a process's share of one is whole micro-batches."""
    config = spec.settings
    prompts = config.data.train_batch_size
    mini_batch = config.actor.ppo_mini_batch_size
    if prompts < 1 or prompts % mini_batch:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of actor.ppo_mini_batch_size="
            f"{mini_batch}"
        )
    if not shares_evenly(config, spec.machine.num_processes):
        raise ValueError(_uneven(spec))


def _uneven(spec: RunSpec) -> str:
    """Says why a process gets no whole groups or micro-batches, and the nearest sizes that fit."""
    config = spec.settings
    num_processes = spec.machine.num_processes
    mini = config.actor.ppo_mini_batch_size
    micro = config.actor.ppo_micro_batch_size_per_gpu
    train_n = spec.trained_n
    if mini % num_processes == 0:
        samples = spec.samples_per_mini_batch
        group = f"actor.train_n={train_n}" if train_n else f"rollout.n={config.rollout.n}"
        fits = [size for size in range(1, samples + 1) if samples % size == 0]
        return (
            f"actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {samples} samples of "
            f"a mini-batch on one process (actor.ppo_mini_batch_size={mini} x {group} / "
            f"{num_processes}): give {_nearest(fits, micro)}"
        )
    # A process takes whole groups, as many as fill whole micro-batches.
    step = num_processes * micro // math.gcd(micro, train_n or config.rollout.n)
    numbers = [number for number in range(1, mini + 1) if shares_evenly(config, number)]
    start = f"start {_nearest(numbers, num_processes)} process(es), or " if numbers else ""
    return (
        f"actor.ppo_mini_batch_size={mini} prompts cannot be shared evenly by {num_processes} "
        f"processes (a group of samples stays on one): {start}give "
        f"{_nearest(range(step, mini + step + 1, step), mini)} (data.train_batch_size: a multiple)"
    )


def _nearest(sizes: Sequence[int], wanted: int) -> str:
    """Returns the largest size below the wanted one and the smallest above it, in words."""
    below = [size for size in sizes if size < wanted]
    above = [size for size in sizes if size > wanted]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _check_bounds_of_steps(spec: RunSpec) -> None:
    """Refuses a loss that cannot take the bound of each step in place of "auto:k"."""
    section = spec.settings.actor.diffusion_loss
    if spec.is_text or not section.auto:
        return
    try:
        section.bounded(spec.step_loss, torch.ones(1, 1, dtype=torch.float64))
    except (RuntimeError, TypeError, ValueError) as error:
        (name,) = section.auto
        raise ValueError(
            f"{DIFFUSION_KEY}.{name}={vars(section)[name]}: loss_mode={section.loss_mode} takes a "
            f"number and no bound for each step, [B, T] ({error}): give a number"
        ) from error

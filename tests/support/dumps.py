"""Dumps of trajectories by the formulas that the peers publish, with or without a planted fault.

The formulas are written down here anew, so that they judge those of the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Made:
    """Says how a dump is made: the engine samples, and the trainer evaluates what it sampled."""

    seed: int
    kind: str = "sde"
    level: float = 0.7
    steps: int = 8
    groups: int = 3
    n: int = 6
    shape: tuple[int, ...] = (4, 12, 12)
    shift: float = 3.0
    means: bool = True
    error: float = 0.01  # of the trainer's velocities, relative: rounding
    engine_form: str = "usual"
    trainer_form: str = "usual"
    engine_std: Callable[..., Any] | None = None  # of the log-prob; None for that of the noise
    trainer_std: Callable[..., Any] | None = None
    noise: Callable[[Tensor, int, int], Tensor] = lambda noise, groups, n: noise  # changes it
    stale: tuple[float, float] = (0.0, 0.0)  # share of samples, and error of their velocities
    stored: Callable[[Tensor], Tensor] = lambda latents: (
        latents
    )  # changes them behind the log-probs
    settings: dict[str, Any] = field(default_factory=dict)  # said in place of the true ones
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None  # of the tensors at last


def std_of(kind: str, level: float, sigma: float, after: float, first: float) -> float:
    """Returns the standard deviation of a step, dt included."""
    if kind == "cps":
        return after * math.sin(level * math.pi / 2)
    if kind == "dance_sde":
        return level * math.sqrt(sigma - after)
    below = first if sigma == 1 else sigma
    return level * math.sqrt(sigma / (1 - below)) * math.sqrt(sigma - after)


def mean_of(kind: str, x: Tensor, v: Tensor, sigma: float, after: float, std: float) -> Tensor:
    """Returns the mean of a step."""
    if kind == "cps":
        clean, noise = x - sigma * v, x + (1 - sigma) * v
        return (1 - after) * clean + math.sqrt(after**2 - std**2) * noise
    dt = after - sigma
    drift = std**2 / -dt / (2 * sigma)
    return x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt


def log_prob_of(form: str, kind: str, x: Tensor, mean: Tensor, std: float) -> Tensor:
    """Returns the log-prob of a step in one of the forms that are in use, or are mistakes."""
    square = (x - mean) ** 2
    density = -square / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
    elements = {
        "usual": -square if kind == "cps" else density,
        "gaussian": density,
        "short": -square,
        "sum": density * square[0].numel(),
        "plain": -square / (2 * std**2),
        "no log 2 pi": density + math.log(2 * math.pi) / 2,
        "half": density / 2,
    }[form]
    return elements.flatten(1).mean(1)


def sigmas_of(steps: int, shift: float) -> list[float]:
    """Returns a schedule with a shift, which ends at 0."""
    plain = [1 - i * (1 - 0.02) / (steps - 1) for i in range(steps)]
    return [shift * s / (1 + (shift - 1) * s) for s in plain] + [0.0]


def make_tensors(how: Made) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Samples and evaluates trajectories; returns tensors, and the settings that the dump tells."""
    source = torch.Generator().manual_seed(how.seed)
    rows = how.groups * how.n
    sigmas = sigmas_of(how.steps, how.shift)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    # A picture for each prompt, smooth as latents are, and a little of each sample's own.
    picture = normal(how.groups, *how.shape).cumsum(-1) / math.sqrt(how.shape[-1])
    picture = picture.repeat_interleave(how.n, 0)
    stale = torch.zeros(rows, *([1] * len(how.shape)), dtype=torch.float64)
    stale[: round(how.stale[0] * rows)] = how.stale[1]
    x = normal(rows, *how.shape)
    states, means, rollout, old = [x], [], [], []
    window = how.steps - 1  # the last step is not trained
    for i in range(window):
        sigma, after = sigmas[i], sigmas[i + 1]
        std = std_of(how.kind, how.level, sigma, after, sigmas[1])
        v = (x - picture - 0.3 * torch.tanh(x)) / max(sigma, 0.3)
        size = v.square().mean().sqrt()
        error = torch.hypot(torch.tensor(how.error, dtype=torch.float64), stale)
        other = v + error * size * normal(rows, *how.shape)
        mean, trained = (mean_of(how.kind, x, each, sigma, after, std) for each in (v, other))
        noise = how.noise(normal(rows, *how.shape), how.groups, how.n)
        behind = mean + std * noise
        kept = how.stored(behind)  # which is all that the trainer has
        said = {"usual": std}
        for name, change in (("engine", how.engine_std), ("trainer", how.trainer_std)):
            said[name] = std if change is None else change(how, sigmas, i)
        rollout.append(log_prob_of(how.engine_form, how.kind, behind, mean, said["engine"]))
        old.append(log_prob_of(how.trainer_form, how.kind, kept, trained, said["trainer"]))
        x = behind
        means.append(mean)
        states.append(x)
    rewards = torch.rand(how.groups, how.n, generator=source, dtype=torch.float64)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
    drift = 1e-4 * normal(rows, window)
    tensors = {
        "latents": how.stored(torch.stack(states, 1)).float(),
        "sigmas": torch.tensor(sigmas),
        "timesteps": 1000 * torch.tensor(sigmas[:window]).expand(rows, window),
        "rollout_log_probs": torch.stack(rollout, 1).float(),
        "old_log_probs": torch.stack(old, 1).float(),
        "new_log_probs": (torch.stack(old, 1) + drift).float(),
        "advantages": advantages.flatten().unsqueeze(1).expand(rows, window).float(),
        "group": torch.arange(how.groups).repeat_interleave(how.n),
    }
    if how.means:
        tensors["means"] = torch.stack(means, 1).float()
    how.change(tensors)
    settings = {"noise_level": how.level, "sde_type": how.kind, "clip_ratio": 5e-3}
    return tensors, settings | how.settings


def write_dump(path: Path, how: Made) -> Path:
    """Writes a dump as a safetensors file with a JSON of settings beside it."""
    tensors, settings = make_tensors(how)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.with_suffix(".json").write_text(json.dumps(settings))
    return path

"""What several adapters share: sizes, the resolution-dependent time shift, packed latents, and
pictures out of the VAE.

Legend: B samples, C latent channels, H and W latent height and width, F latent frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.base import Schedule


def check_size(spec: SamplerSpec, *, multiple: int, largest: int | None = None) -> None:
    """ValueError unless height and width are multiples of `multiple` pixels, up to `largest` where
    there is one.
    """
    for name, size in (("height", spec.height), ("width", spec.width)):
        if size % multiple or size <= 0 or (largest is not None and size > largest):
            limit = "" if largest is None else f" up to {largest}"
            raise ValueError(
                f"rollout.pipeline.{name}={size}: this model makes multiples of {multiple}{limit} "
                "pixels"
            )


def dynamic_shift(scheduler: Any, num_tokens: int) -> float:
    """`mu` of the scheduler's time shift for an image of `num_tokens`: a line through two points of
    its config.
    """
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return float(num_tokens * slope + (config.base_shift - slope * config.base_image_seq_len))


def linear_schedule(
    scheduler: Any, num_steps: int, num_tokens: int, device: torch.device
) -> Schedule:
    """Evenly spaced sigmas from 1 to 1 / num_steps, then shifted for an image of `num_tokens`."""
    scheduler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / num_steps, num_steps),
        mu=dynamic_shift(scheduler, num_tokens),
        device=device,
    )
    return Schedule(scheduler.sigmas.clone(), scheduler.timesteps.clone())


def unpack(latents: Tensor, rows: int, columns: int) -> Tensor:
    """[B, rows * columns, 4 C], patches of 2 x 2 by row, to [B, C, 2 rows, 2 columns]."""
    patches = latents.unflatten(1, (rows, columns)).unflatten(-1, (-1, 2, 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def unscaled(latents: Tensor, vae: Any) -> Tensor:
    """Latents [B, C, F, H, W] as a video VAE decodes them, from those of mean 0 and deviation 1 by
    channel.
    """
    mean, std = (
        torch.tensor(values).reshape(1, -1, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents / (1.0 / std) + mean  # the stock pipelines' order of rounding


def to_uint8(pictures: np.ndarray) -> np.ndarray:
    """Values in [0, 1] as 0 to 255."""
    return (pictures * 255).round().astype(np.uint8)

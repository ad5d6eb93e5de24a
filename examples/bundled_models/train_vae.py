"""Trains the VAE of the tiny model on rendered words.

Legend: B pictures of a batch, N pictures of the pool, H and W their height and width; latents are
[., 8, H/4, W/4].
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from bundled_models import glyphs, tiny_sd3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeConfig:
    """The settings of the training.

    Attributes:
      num_steps: number of steps.
      batch_size: pictures of a step.
      pool_size: pictures that the batches are drawn from.
      lr: the highest learning rate of AdamW.
      warmup_steps: steps in which the learning rate rises.
      kl_coef: weight of the KL against the reconstruction error, both means per dimension.
      log_every: steps between two lines of the log.
    """

    num_steps: int = 1600
    batch_size: int = 32
    pool_size: int = 12000
    lr: float = 2e-3
    warmup_steps: int = 50
    kl_coef: float = 5e-4
    log_every: int = 100


def train_vae(config: VaeConfig, *, exclude: Collection[str], seed: int) -> AutoencoderKL:
    """Trains a VAE, and sets its scaling and shift to give latents of mean 0 and deviation 1.

    Args:
      config: the settings.
      exclude: words that are never trained on.
      seed: seed of the initial weights, the pool and the batches.

    Returns:
      The VAE, frozen.
    """
    torch.manual_seed(seed)  # for the initial weights
    vae = tiny_sd3.autoencoder().to(memory_format=torch.channels_last)
    rng = np.random.default_rng(seed)
    words = glyphs.distinct_words(config.pool_size, rng, exclude=exclude)
    pool_NCHW = torch.from_numpy(glyphs.render_all(words, rng)).permute(0, 3, 1, 2)

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=config.lr, weight_decay=0.0)
    start = time.perf_counter()
    for step in range(1, config.num_steps + 1):
        optimizer.param_groups[0]["lr"] = config.lr * _lr_factor(step, config)
        rows = torch.randint(len(pool_NCHW), (config.batch_size,), generator=generator)
        error, kl = _losses(vae, to_float(pool_NCHW[rows]), generator)
        optimizer.zero_grad()
        (error + config.kl_coef * kl).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % config.log_every == 0:
            values = (step, error.item(), kl.item(), time.perf_counter() - start)
            logger.info("vae step %d: reconstruction %.4f, kl %.3f, %.0f s", *values)

    _standardise(vae, pool_NCHW[:2048])
    return vae.eval().requires_grad_(False)


def to_float(pixels: Tensor) -> Tensor:
    """Brings uint8 pixels to the VAE's range [-1, 1].

    Args:
      pixels: uint8, [B, 3, H, W].

    Returns:
      fp32, [B, 3, H, W], with the channels last in memory, which is faster on a CPU.
    """
    return (pixels.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor, *, batch_size: int = 64) -> Tensor:
    """Encodes pictures to the means of their posteriors.

    Args:
      vae: the VAE.
      pixels: uint8, [N, 3, H, W].
      batch_size: pictures of one forward.

    Returns:
      Latents in the VAE's own scale, [N, 8, H/4, W/4].
    """
    batches = pixels.split(batch_size)
    means = [vae.encode(to_float(batch)).latent_dist.mean for batch in batches]
    return torch.cat(means).contiguous()


def _losses(
    vae: AutoencoderKL, images: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Reconstruction error (L1 + L2) and KL to N(0, 1), each a mean per dimension."""
    posterior = vae.encode(images).latent_dist
    difference = vae.decode(posterior.sample(generator)).sample - images
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar)
    return difference.abs().mean() + difference.square().mean(), kl.mean()


def _lr_factor(step: int, config: VaeConfig) -> float:
    """Linear up over the warm-up, then linear down to 2% over the whole run."""
    return min(1.0, step / config.warmup_steps) * max(0.02, 1 - step / config.num_steps)


def _standardise(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Sets scaling and shift so that the latents of these pictures have mean 0 and deviation 1."""
    latents = encode(vae, pixels)
    vae.register_to_config(
        scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item()
    )

"""The SDE scheduler in a stock diffusers pipeline."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.policies.scheduler import FlowMatchSDEScheduler


def test_scheduler_in_a_stock_pipeline(checkpoint: Path) -> None:
    """Without noise the images are the stock ones. With noise they depend on the seed."""
    stock = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    stock.set_progress_bar_config(disable=True)

    def image(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return stock(
            '"AB7X"',
            height=32,
            width=64,
            num_inference_steps=4,
            guidance_scale=1.0,
            max_sequence_length=16,
            latents=normal((8, 8, 16), [5], "latents"),
            output_type="latent",
        ).images

    wanted = image(0)
    stock.scheduler = FlowMatchSDEScheduler.replacing(
        stock.scheduler, sde_type="cps", noise_level=0.0
    )
    torch.testing.assert_close(image(0), wanted, atol=1e-5, rtol=0)
    stock.scheduler = FlowMatchSDEScheduler.replacing(
        stock.scheduler, sde_type="cps", noise_level=0.5
    )
    assert torch.equal(image(1), image(1))
    assert not torch.allclose(image(1), image(2))
    assert not torch.allclose(image(1), wanted)

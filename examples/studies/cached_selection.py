"""Measures what training on the extremes of a pool does to the gradient, on the bundled model.

    python examples/studies/cached_selection.py [--output FOLDER]

The gradient of all 24 samples of each prompt is compared with that of the 12 whose advantages are
farthest from 0, each against the pool's mean, and with that of 12 at random, for 12 batches of 8
prompts with exact rollouts. The reward is that of gradient_image.py. A batch of new noise, whole,
tells how much two whole gradients have in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from cells import RESULTS, save
from gradient_image import STUDY
from gradient_image_problem import PROMPTS, Images
from gradient_regions import unbounded
from torch import Tensor

from flowgrpo_rc.core.advantages import farthest
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

BATCHES = 12
POOL, KEPT = 24, 12


def gradients(images: Images, index: int) -> Tensor:
    """Computes gradients [3, P]: of all samples of a batch, of its extremes, of a random half.

    Args:
      images: the problem.
      index: number of the batch.
    """
    batch, rewards = images.rollout(images.exact, index, POOL)
    found = images.evaluation(batch)
    estimator = unbounded()["bypass_centered_none"]
    slopes = estimator.coefficients(estimator.settle(batch, found), rewards, found)[0]
    centred = (rewards.view(-1, POOL) - rewards.view(-1, POOL).mean(1, keepdim=True)).flatten()
    masks = torch.zeros(3, len(batch))
    masks[0] = 1
    masks[1, farthest(centred, batch.group, KEPT)] = 1
    draw = torch.rand(len(batch), generator=torch.Generator().manual_seed(index))
    masks[2, farthest(draw, batch.group, KEPT)] = 1
    parameters = list(lora_parameters(images.network).values())
    total = torch.zeros(3, sum(p.numel() for p in parameters))
    for t, piece in enumerate(images.policy.pieces(batch)):
        now = images.policy.evaluate(piece)
        for row, mask in zip(total, masks, strict=True):
            value = (mask * slopes[0, :, t] * now.log_probs[:, 0]).sum()
            parts = torch.autograd.grad(value, parameters, retain_graph=True)
            row += torch.cat([part.flatten() for part in parts])
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = Images()
    images.train(10)
    images.exact = DiffusersEngine(
        images.model, images.network, dtype="fp32", chunk_size=PROMPTS * POOL
    )
    images.exact.sync_weights(images.lora(), 0)
    found = torch.stack([gradients(images, index) for index in range(BATCHES)])
    cosine = torch.nn.functional.cosine_similarity
    whole, extremes, half = found.unbind(1)
    cell = {
        "extremes": cosine(whole, extremes).tolist(),
        "half": cosine(whole, half).tolist(),
        "other_noise": cosine(whole, whole.roll(1, 0)).tolist(),
        "length": (extremes.norm(dim=1) / whole.norm(dim=1)).tolist(),
        "sums": cosine(whole.sum(0), extremes.sum(0), dim=0).item(),
        "half_sums": cosine(whole.sum(0), half.sum(0), dim=0).item(),
    }
    save(STUDY, "image_selection", cell, options.output)


if __name__ == "__main__":
    main()

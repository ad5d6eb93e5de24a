"""The gradient study on the bundled Stable Diffusion 3: does a direction raise the reward?

    python examples/studies/gradient_image.py [--quick] [--output FOLDER]

The true gradient of a real network costs too much. So each estimator's gradient is judged by what
it does: the LoRA is moved along it, both ways, and the expected reward is measured on the same
prompts and the same noise at every place (common random numbers).

    slope(h) = (E R(theta + h g / |g|) - E R(theta - h g / |g|)) / (2 h)

The reward is smooth: minus the mean squared distance of the final latents from those of a rendering
of the prompt's word. The policy is a few on-policy updates away from the bundled checkpoint. Every
rollout uses the same prompts and noise, in blocks that share nothing.

Legend: E estimators, P trained numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cells import RESULTS, Cell, load, save
from gradient_image_problem import PROMPTS, SAMPLES, Images, Lora
from gradient_regions import unbounded
from torch import Tensor

STUDY = "gradient"
JUDGED = 4  # of a prompt, of the batches that judge a direction
JUDGES = 10**6  # number of the first batch that judges a direction


class Plan(NamedTuple):
    """The size of the study.

    Attributes:
      moves: on-policy updates before it.
      blocks: batches, each of which makes a direction of every estimator.
      step: length h of the moves along a direction.
      further: another length, for the first blocks alone.
      num_further: number of these blocks.
      rollouts: names of the rollouts.
    """

    moves: int = 10
    blocks: int = 6
    step: float = 0.1
    further: float = 0.4
    num_further: int = 2
    rollouts: Sequence[str] = ("exact", "bf16", "int4", "bits2", "stale_8", "cached")


QUICK = Plan(moves=1, blocks=1, num_further=1, rollouts=("exact",))


# Of `unbounded`: bypass with a clip that holds nothing back, recomputed, centered, Guard.
ESTIMATORS = (
    "bypass_plain_none",
    "decoupled_plain_none",
    "bypass_centered_none",
    "decoupled_centered_none",
    "guard_bypass_plain_none",
)


def slope_along(images: Images, home: Lora, direction: Tensor, block: int, h: float) -> float:
    """Measures the slope of the expected reward along a direction.

    Args:
      images: the problem.
      home: the policy's LoRA.
      direction: [P].
      block: number of the batch that judges.
      h: length of the moves.
    """
    sizes = [tensor.numel() for tensor in home.values()]
    unit = (direction / direction.norm()).split(sizes)
    sides = []
    for sign in (1, -1):
        moved = {
            name: tensor + sign * h * part.view_as(tensor)
            for (name, tensor), part in zip(home.items(), unit, strict=True)
        }
        images.exact.sync_weights(moved, 0)
        sides.append(images.rollout(images.exact, JUDGES + block, JUDGED)[1].mean())
    images.exact.sync_weights(home, 0)
    return ((sides[0] - sides[1]) / (2 * h)).item()


def judge(images: Images, home: Lora, directions: Tensor, block: int, h: float) -> list[float]:
    """Measures the slope of the expected reward along directions [E, P]; equal ones once.

    Args:
      images: the problem.
      home: the policy's LoRA.
      directions: [E, P].
      block: number of the batch that judges.
      h: length of the moves.
    """
    distinct, which = directions.unique(dim=0, return_inverse=True)
    slopes = [slope_along(images, home, direction, block, h) for direction in distinct]
    return [slopes[i] for i in which.tolist()]


def run_cell(images: Images, rollout: str, versions: Sequence[Lora], plan: Plan) -> Cell:
    """Judges the gradients of every estimator on one rollout.

    Args:
      images: the problem.
      rollout: name of the rollout.
      versions: the LoRA after each update; the last is the policy's.
      plan: the size of the study.

    Returns:
      The cell, with one slope for each block, and the cosine with the gradient of exact rollouts
      from the same noise.
    """
    start = time.process_time()
    given = {name: unbounded()[name] for name in ESTIMATORS}
    engine = images.engine(rollout, versions)
    near = []
    far = []
    cosines = []
    for block in range(plan.blocks):
        # The gradient is the loss's, so the reward rises against it.
        directions = -images.gradients(engine, given, block)
        exact = -images.gradients(images.exact, given, block)
        cosines.append(torch.cosine_similarity(directions, exact).tolist())
        near.append(judge(images, versions[-1], directions, block, plan.step))
        if block < plan.num_further:
            far.append(judge(images, versions[-1], directions, block, plan.further))
    return {
        "elements": 1024,
        "images": PROMPTS * SAMPLES,
        "judges": PROMPTS * JUDGED,
        "steps": [plan.step, plan.further],
        "slopes": dict(zip(given, torch.tensor(near).T.tolist(), strict=True)),
        "further": dict(zip(given, torch.tensor(far).T.tolist(), strict=True)),
        "cosines": dict(zip(given, torch.tensor(cosines).T.tolist(), strict=True)),
        "cpu_seconds": round(time.process_time() - start),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures the rollouts that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="little, to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = QUICK if options.quick else Plan()
    images = Images()
    versions = images.train(plan.moves)
    for rollout in plan.rollouts:
        name = f"image_{rollout}"
        if name not in load(STUDY, options.output):
            save(STUDY, name, run_cell(images, rollout, versions, plan), options.output)
            print(name, flush=True)


if __name__ == "__main__":
    main()

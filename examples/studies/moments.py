"""Lengths and angles of expected gradients, from noisy ones, without the bias of squared noise.

Legend:
    M  batches that a mismatched rollout and the policy itself made from the same noise
    N  batches of the policy itself, at least M; the first M are those above
    P  trained numbers
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCKS = 16  # of batches, for the jackknife


class Rows(NamedTuple):
    """Gradients of one estimator, one row for each batch.

    Attributes:
      reward: of the estimator's loss, [M, P].
      chance: of its loss with the rewards dealt out at random, [M, P].
      truth: of the loss on the policy's own batches, [N, P].
      truth_chance: of that loss with the rewards dealt out at random, [M, P].
      to_rollout: of the mean KL from the rollout, [M, P].
    """

    reward: Tensor
    chance: Tensor
    truth: Tensor
    truth_chance: Tensor
    to_rollout: Tensor

    def without(self, block: int) -> Rows:
        """Returns the rows without every `BLOCKS`th batch, starting from number `block`."""
        return Rows(*(rows[torch.arange(len(rows)) % BLOCKS != block] for rows in self))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Estimates <E a, E b> without bias.

        sum_{i != j} <a_i, b_j> / (M (N - 1))

    Rows with the same number come from one draw, so their noise is not independent, and their
    product is left out.

    Args:
      a: [M, P].
      b: [N, P] with N >= M.

    Returns:
      The inner product of the expected rows, a scalar.
    """
    count = len(a)
    other = len(b)
    return (a.sum(0) @ b.sum(0) - (a * b[:count]).sum()) / (count * (other - 1))


def length(a: Tensor) -> Tensor:
    """Estimates |E a| from rows [M, P]; 0 if the noise gives a negative square."""
    return inner(a, a).clamp(min=0).sqrt()


def spread(a: Tensor) -> Tensor:
    """Computes the trace of the covariance of rows [M, P]."""
    return ((a - a.mean(0)) ** 2).sum() / (len(a) - 1)


def quantities(rows: Rows) -> dict[str, Tensor]:
    """Computes what the study reports of an estimator.

    Lengths are in units of the length of the true gradient. g is the gradient of the estimator:

        bias        |E g - truth|
        along       the component of E g along the truth
        cosine      of the angle between E g and the truth
        variance    of one batch's gradient, over that of an on-policy batch
        chance      |E g| for rewards dealt out at random, which should be 0
        to_rollout  cosine of that g with the gradient of the KL from the rollout; 1 if its descent
                    leads straight to the rollout's policy

    Args:
      rows: the gradients.

    Returns:
      Name -> scalar.
    """
    truth = rows.truth
    paired = truth[: len(rows.reward)]
    error = rows.reward - paired
    drift = rows.chance - rows.truth_chance
    square = inner(truth, truth)
    across = inner(error, truth)
    bias = inner(error, error)
    return {
        "bias": (bias.clamp(min=0) / square).sqrt(),
        "along": 1 + across / square,
        "cosine": (square + across) / ((bias + 2 * across + square) * square).sqrt(),
        "variance": spread(rows.reward) / spread(paired),
        "chance": length(drift) / square.sqrt(),
        "to_rollout": inner(drift, rows.to_rollout) / (length(drift) * length(rows.to_rollout)),
    }


def estimate(rows: Rows) -> dict[str, list[float] | None]:
    """Estimates each quantity and its standard error, by the jackknife over blocks of batches.

    Args:
      rows: the gradients.

    Returns:
      Name -> [value, standard error]. None if the noise leaves it open: a value is not finite, or
      `to_rollout` is the angle of a drift that is shorter than three standard errors.
    """
    left_out = [quantities(rows.without(block)) for block in range(min(BLOCKS, len(rows.reward)))]
    found: dict[str, list[float] | None] = {}
    for name, value in quantities(rows).items():
        values = torch.stack([part[name] for part in left_out])
        error = ((values - values.mean()) ** 2).mean().mul(len(values) - 1).sqrt()
        found[name] = [value.item(), error.item()] if torch.isfinite(value + error) else None
    if found["chance"] is None or not found["chance"][0] > 3 * found["chance"][1]:
        found["to_rollout"] = None
    return found

"""Lengths and angles of expected gradients, from noisy ones, without the bias that noise has on
squares.

Legend: M batches that a mismatched rollout and the policy itself made from the same noise, N >= M
batches of the policy itself, of which the first M are those; P trained numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCKS = 16  # of batches, for the jackknife


class Rows(NamedTuple):
    """Gradients: `reward` [M, P] of an estimator's loss, `chance` [M, P] of its loss with the
    rewards dealt out at random, `truth` [N, P] and `truth_chance` [M, P] of the policy's own,
    `to_rollout` [M, P] of the mean KL from the rollout."""

    reward: Tensor
    chance: Tensor
    truth: Tensor
    truth_chance: Tensor
    to_rollout: Tensor

    def without(self, block: int) -> Rows:
        """Leaving out every `BLOCKS`th batch."""
        return Rows(*(rows[torch.arange(len(rows)) % BLOCKS != block] for rows in self))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<E a, E b> from rows [M, P] and [N, P], M <= N, of which the first M belong together and
    others are independent.

    The products of rows that belong together, whose noise is not independent, are left out.
    """
    count, other = len(a), len(b)
    return (a.sum(0) @ b.sum(0) - (a * b[:count]).sum()) / (count * (other - 1))


def length(a: Tensor) -> Tensor:
    """|E a|; 0 where it drowns in the noise."""
    return inner(a, a).clamp(min=0).sqrt()


def spread(a: Tensor) -> Tensor:
    """Trace of the covariance of rows [M, P]."""
    return ((a - a.mean(0)) ** 2).sum() / (len(a) - 1)


def quantities(rows: Rows) -> dict[str, Tensor]:
    """In units of the true gradient's length.

    bias: |E g - truth|; along: the component of E g along the truth; cosine: between them;
    variance: of one batch's gradient, over that of an on-policy one; chance: |E g| where rewards
    are dealt out at random and no gradient should be; to_rollout: its cosine with the gradient of
    the KL from the rollout, 1 where its descent leads straight to the rollout's policy.
    """
    paired, truth = rows.truth[: len(rows.reward)], rows.truth
    error, drift = rows.reward - paired, rows.chance - rows.truth_chance
    square, across, bias = inner(truth, truth), inner(error, truth), inner(error, error)
    return {
        "bias": (bias.clamp(min=0) / square).sqrt(),
        "along": 1 + across / square,
        "cosine": (square + across) / ((bias + 2 * across + square) * square).sqrt(),
        "variance": spread(rows.reward) / spread(paired),
        "chance": length(drift) / square.sqrt(),
        "to_rollout": inner(drift, rows.to_rollout) / (length(drift) * length(rows.to_rollout)),
    }


def estimate(rows: Rows) -> dict[str, list[float] | None]:
    """Each quantity with its standard error, by the jackknife over blocks of batches. None for an
    angle that the noise
    leaves open: not finite, or of a drift that is not three standard errors long."""
    left_out = [quantities(rows.without(block)) for block in range(min(BLOCKS, len(rows.reward)))]
    found: dict[str, list[float] | None] = {}
    for name, value in quantities(rows).items():
        values = torch.stack([part[name] for part in left_out])
        error = ((values - values.mean()) ** 2).mean().mul(len(values) - 1).sqrt()
        found[name] = [value.item(), error.item()] if torch.isfinite(value + error) else None
    if found["chance"] is None or not found["chance"][0] > 3 * found["chance"][1]:
        found["to_rollout"] = None
    return found

"""Histograms against numpy, and over processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.builders import on_shards
from support.decisions import normal, observation

from flowgrpo_rc.monitoring.histograms import bin_edges, count, edges, histograms


def test_bins_are_numpys_on_a_logarithmic_grid() -> None:
    """There are ten edges for each power of ten, on both sides of zero, from 1e-9 to 1e3."""
    sizes = np.logspace(-9, 3, 121)
    grid = np.concatenate([-sizes[::-1], sizes])
    values = torch.cat(
        [
            normal(500),
            normal(100, scale=1e-8, seed=1),
            normal(50, scale=3.0, seed=2),
            torch.zeros(3),
        ]
    )
    found = count(values).numpy()
    np.testing.assert_array_equal(found, np.histogram(values.numpy(), bins=grid)[0])
    assert found[120] >= 3
    np.testing.assert_allclose(edges(range(-120, 121)), grid, rtol=1e-12)
    assert bin_edges(1) == pytest.approx((1e-9, 10**-8.9))


def test_infinite_values_are_in_the_outermost_bins_and_nan_in_none() -> None:
    found = count(torch.tensor([math.inf, -math.inf, math.nan, 5e3]))
    assert found.nonzero().flatten().tolist() == [0, 240]
    assert found.sum() == 3


def test_histograms_are_those_of_all_processes_before_the_update() -> None:
    difference = normal(6, 3)
    weights = 1 + normal(6, 3, seed=1)
    valid = torch.ones(6, 3, dtype=torch.bool)
    kept = torch.ones(6, 3, dtype=torch.bool)
    valid[0, 2] = False
    kept[4, 1] = False
    whole = {"step_mask": valid, "keep_mask": kept & valid, "weights": weights}
    (alone,) = on_shards(
        1, lambda rank, reduce: histograms([observation(difference, **whole)], reduce["sum"])
    )
    assert sum(alone["log_ratio"].values()) == 17
    assert sum(alone["log_weight"].values()) == 16
    assert (
        alone["log_weight"]
        == histograms([observation(weights[kept & valid].log().unsqueeze(0))])["log_ratio"]
    )

    def shard(rank: int, reduce: Any) -> Any:
        rows = slice(2 * rank, 2 * rank + 2)
        parts = [
            {name: value[r : r + 1] for name, value in whole.items()}
            for r in range(rows.start, rows.stop)
        ]
        pieces = [
            observation(difference[2 * rank + r : 2 * rank + r + 1], **part)
            for r, part in enumerate(parts)
        ]
        later = observation(normal(2, 3, seed=5), updated=True)
        return histograms([*pieces, later], reduce["sum"])

    assert on_shards(3, shard) == [alone] * 3

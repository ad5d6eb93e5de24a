"""Metrics of rows do not depend on where blocks of rows begin, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.row_metrics import RowMetrics


def mean_and_highest(values_B: Tensor, present_B: Tensor) -> MetricBag:
    metrics = MetricBag()
    metrics.mean("mean", values_B, present_B)
    metrics.max("highest", values_B, present_B)
    return metrics


def put(metrics: RowMetrics, values_B: Tensor, present_B: Tensor) -> None:
    metrics.put("values", mean_and_highest, values_B=values_B, present_B=present_B)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_blocks_give_what_all_rows_give_at_once(size: int) -> None:
    source = torch.Generator().manual_seed(0)
    values_B = torch.randn(100, generator=source, dtype=torch.float64)
    present_B = torch.rand(100, generator=source) < 0.7
    metrics = RowMetrics()
    for part, present in zip(values_B.split(size), present_B.split(size), strict=True):
        put(metrics, part, present)
    assert metrics.bag().compute() == mean_and_highest(values_B, present_B).compute()


def test_each_topic_has_its_function() -> None:
    metrics = RowMetrics()
    put(metrics, torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    metrics.put("count", _sum_of, ones_B=torch.ones(2))
    assert metrics.bag().compute() == {"mean": 2.0, "highest": 3.0, "count": 2.0}


def _sum_of(ones_B: Tensor) -> MetricBag:
    metrics = MetricBag()
    metrics.sum("count", ones_B)
    return metrics


def test_without_a_block_there_is_no_metric() -> None:
    assert RowMetrics().bag().compute() == {}

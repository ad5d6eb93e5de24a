"""Metrics of rows do not depend on where blocks of rows begin, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag


def mean_and_highest(values_B: Tensor, present_B: Tensor) -> MetricBag:
    metrics = MetricBag()
    metrics.mean("mean", values_B, present_B)
    metrics.max("highest", values_B, present_B)
    return metrics


def put(metrics: MetricBag, values_B: Tensor, present_B: Tensor) -> None:
    metrics.rows("values", mean_and_highest, values_B=values_B, present_B=present_B)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_blocks_give_what_all_rows_give_at_once(size: int) -> None:
    source = torch.Generator().manual_seed(0)
    values_B = torch.randn(100, generator=source, dtype=torch.float64)
    present_B = torch.rand(100, generator=source) < 0.7
    metrics = MetricBag()
    for part, present in zip(values_B.split(size), present_B.split(size), strict=True):
        put(metrics, part, present)
    assert metrics.compute() == mean_and_highest(values_B, present_B).compute()


def test_each_topic_has_its_function() -> None:
    metrics = MetricBag()
    put(metrics, torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    metrics.rows("count", _sum_of, ones_B=torch.ones(2))
    assert metrics.compute() == {"mean": 2.0, "highest": 3.0, "count": 2.0}


def _sum_of(ones_B: Tensor) -> MetricBag:
    metrics = MetricBag()
    metrics.sum("count", ones_B)
    return metrics


def test_rows_of_merged_bags_are_measured_at_once() -> None:
    values_B, present_B = torch.tensor([0.1, 0.2, 0.3, 4.0]), torch.ones(4, dtype=torch.bool)
    metrics = MetricBag()
    for rows in (slice(0, 3), slice(3, 4)):
        block, outer = MetricBag(), MetricBag()
        put(block, values_B[rows], present_B[rows])
        outer.merge(block, "inner")
        metrics.merge(outer, "outer")
    wanted = mean_and_highest(values_B, present_B).compute()
    assert metrics.compute() == {f"outer/inner/{name}": value for name, value in wanted.items()}


def test_rows_are_measured_before_metrics_are_renamed_or_replaced() -> None:
    metrics = MetricBag()
    put(metrics, torch.ones(2), torch.tensor([True, True]))
    metrics.rename({"mean": "average"}, keep=False)
    later = MetricBag()
    put(later, torch.tensor([5.0]), torch.tensor([True]))
    metrics.replace(later)
    assert metrics.compute() == {"average": 1.0, "mean": 5.0, "highest": 5.0}


def test_without_a_block_there_is_no_metric() -> None:
    assert MetricBag().compute() == {}

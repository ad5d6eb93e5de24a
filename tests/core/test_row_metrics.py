"""Metrics of rows do not depend on where blocks of rows begin, to the last bit."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag


class Columns(NamedTuple):
    values_B: Tensor
    present_B: Tensor


def mean_and_highest(columns: Columns) -> MetricBag:
    metrics = MetricBag()
    metrics.mean("mean", *columns)
    metrics.max("highest", *columns)
    return metrics


def put(metrics: MetricBag, *columns: Tensor) -> None:
    metrics.rows("values", mean_and_highest, Columns(*columns))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_blocks_give_what_all_rows_give_at_once(size: int) -> None:
    source = torch.Generator().manual_seed(0)
    values_B = torch.randn(100, generator=source, dtype=torch.float64)
    present_B = torch.rand(100, generator=source) < 0.7
    metrics = MetricBag()
    for part, present in zip(values_B.split(size), present_B.split(size), strict=True):
        put(metrics, part, present)
    assert metrics.compute() == mean_and_highest(Columns(values_B, present_B)).compute()


def test_rows_of_merged_bags_are_measured_at_once() -> None:
    values_B, present_B = torch.tensor([0.1, 0.2, 0.3, 4.0]), torch.ones(4, dtype=torch.bool)
    metrics = MetricBag()
    for rows in (slice(0, 3), slice(3, 4)):
        block, outer = MetricBag(), MetricBag()
        put(block, values_B[rows], present_B[rows])
        outer.merge(block, "inner")
        metrics.merge(outer, "outer")
    wanted = mean_and_highest(Columns(values_B, present_B)).compute()
    assert metrics.compute() == {f"outer/inner/{name}": value for name, value in wanted.items()}


def test_rows_are_measured_before_metrics_are_renamed_or_replaced() -> None:
    metrics = MetricBag()
    put(metrics, torch.ones(2), torch.tensor([True, True]))
    metrics.rename({"mean": "average"}, keep=False)
    later = MetricBag()
    put(later, torch.tensor([5.0]), torch.tensor([True]))
    metrics.replace(later)
    assert metrics.compute() == {"average": 1.0, "mean": 5.0, "highest": 5.0}

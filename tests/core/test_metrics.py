"""MetricBag: what it computes, merges and renames, and how it adds up over processes."""

import math

import pytest
import torch
from support.builders import on_shards
from support.oracles import std

from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments

VALUES = torch.tensor([3.0, -1.0, 4.0, 1.5])
SOME = torch.tensor([True, False, True, False])


def filled(values: torch.Tensor, mask: torch.Tensor | None = None) -> MetricBag:
    bag = MetricBag()
    bag.mean("mean", values, mask)
    bag.max("max", values, mask)
    bag.min("min", values, mask)
    bag.sum("sum", values)
    bag.mean("_square", values**2, mask)
    bag.derive("std", ("mean", "_square"), std_from_moments)
    return bag


def test_mean_sum_max_min_and_derived():
    actual = filled(VALUES).compute()
    assert actual == pytest.approx(
        {"mean": 1.875, "max": 4.0, "min": -1.0, "sum": 7.5, "std": std(VALUES.tolist())}, abs=1e-14
    )


@pytest.mark.parametrize("bad", [9.0, math.nan, math.inf, -math.inf])
def test_what_is_masked_out_takes_no_part(bad):
    values = torch.tensor([3.0, bad, 4.0, bad])
    actual = filled(values, SOME).compute()
    assert (actual["mean"], actual["max"], actual["min"]) == (3.5, 4.0, 3.0)


def test_merge_with_a_prefix_keeps_derived_metrics_apart():
    bag = MetricBag()
    bag.mean("mean", torch.tensor([100.0]))
    for piece in (VALUES[:1], VALUES[1:]):
        bag.merge(filled(piece), "a/b")
    outer = MetricBag()
    outer.merge(bag, "actor")
    actual = outer.compute()
    assert actual["actor/a/b/std"] == pytest.approx(std(VALUES.tolist()), abs=1e-14)
    assert actual["actor/mean"] == 100.0
    assert actual["actor/a/b/mean"] == 1.875
    assert actual["actor/a/b/sum"] == 7.5
    assert not [name for name in actual if "_square" in name]


def test_merge_leaves_the_other_bag_alone():
    other = filled(VALUES)
    bag = MetricBag()
    bag.merge(other)
    bag.merge(other)
    bag.mean("mean", torch.tensor([50.0]))
    assert other.compute() == filled(VALUES).compute()
    assert bag.compute()["sum"] == 15.0


def test_an_empty_mask_leaves_the_metric_out():
    nothing = torch.zeros(4, dtype=torch.bool)
    actual = filled(VALUES, nothing).compute()
    assert set(actual) == {"sum"}
    bag = filled(VALUES, nothing)
    bag.merge(filled(VALUES, SOME))
    assert bag.compute()["mean"] == 3.5
    assert bag.compute()["max"] == 4.0
    assert bag.compute()["min"] == 3.0


def test_sums_are_float64():
    bag = MetricBag()
    for _ in range(10):
        bag.mean("mean", torch.tensor([1e8, 1.0], dtype=torch.float32))
    assert bag.compute()["mean"] == (1e8 + 1) / 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_shown_and_not_hidden(value):
    actual = filled(torch.tensor([1.0, value])).compute()
    assert not math.isfinite(actual["mean"])
    assert not math.isfinite(actual["max"])


@pytest.mark.parametrize("keep", [True, False])
def test_a_renamed_metric_keeps_its_value_and_its_derived_metrics(keep):
    bag = filled(VALUES)
    new = {"mean": "average", "max": "top", "min": "bottom", "sum": "total", "std": "spread"}
    bag.rename(new | {"absent": "x"}, keep=keep)
    old = filled(VALUES).compute()
    assert bag.compute() == {new[was]: old[was] for was in new} | (old if keep else {})
    bag.merge(bag)
    assert bag.compute()["total"] == 15.0
    assert bag.compute()["spread"] == old["std"]


def test_standard_deviations_from_moments():
    values = [3.0, -1.0, 4.0]
    moments = sum(values) / 3, sum(x * x for x in values) / 3
    assert std_from_moments(*moments) == pytest.approx(std(values))
    assert sample_std_from_moments(*moments, 3) == pytest.approx(std(values, lost=1))
    assert std_from_moments(1.0, 1.0 - 1e-16) == sample_std_from_moments(5.0, 25.0, 1) == 0
    assert std_from_moments(1.0, math.inf) == sample_std_from_moments(1.0, math.inf, 2) == math.inf


def test_processes_give_the_statistics_of_all_elements():
    """One of them may have none. A mean is not a mean of means, nor a maximum one of maxima."""
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nothing = torch.zeros(9, dtype=torch.bool)
    parts = [(values[:2], None), (values[2:], None), (0 * values, nothing)]

    def work(rank, reduce):
        return filled(*parts[rank]).compute(reduce["sum"], reduce["max"])

    whole = filled(values).compute()
    for actual in on_shards(3, work):
        assert actual == pytest.approx(whole, abs=1e-12)
        assert actual["max"] == values.max().item()
        assert actual["min"] == values.min().item()


def test_replacing_metrics_does_not_add_them_up() -> None:
    """The kinds of the old and the new metric may differ."""
    bag = MetricBag()
    other = MetricBag()
    bag.mean("p/a", torch.tensor([1.0, 3.0]))
    bag.max("p/b", torch.tensor([5.0]))
    other.max("a", torch.tensor([7.0]))
    bag.replace(other, "p")
    assert bag.compute() == {"p/a": 7.0, "p/b": 5.0}

"""Micro-batches and processes change neither weights nor mask nor metrics."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import log_probs, mask_of, on_shards, run
from support.oracles import Rule

from flowgrpo_rc.core.metrics import MetricBag

TWO = (("seq_mean_k1", 0.7, 1.4), ("token_k2", 0.0, 0.2))
SHARDED = [
    Rule(),
    Rule("token", "mask", 0.8, 1.5, veto=0.5),
    Rule("sequence", bands=TWO),
    Rule("geometric", "icepop", 0.8, 1.5, bands=(("seq_max_k3", 0.0, 0.1),)),
]
NORMALISED = [
    Rule("token", bands=TWO, normalise=True),
    Rule("sequence", bands=TWO, normalise=True, over_kept=True),
    Rule("geometric", "clip", 0.9, 1.2, normalise=True),
]


@pytest.mark.parametrize("rule", SHARDED)
@pytest.mark.parametrize("scale", [1e-6, 0.5])
@pytest.mark.parametrize("cuts", [[3], [1, 2], [1, 2, 3, 4, 5]])
def test_micro_batches_change_neither_weights_mask_nor_metrics(rule, scale, cuts):
    training, rollout = log_probs(scale)
    mask = mask_of("empty")
    whole = run(training, rollout, mask, rule)
    bag = MetricBag()
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, 6], strict=True):
        parts.append(run(training[start:stop], rollout[start:stop], mask[start:stop], rule))
        bag.merge(parts[-1].metrics)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    if whole.weights is not None:
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert bag.compute() == pytest.approx(whole.metrics.compute(), rel=0, abs=1e-12)


@pytest.mark.parametrize("rule", [*SHARDED, *NORMALISED])
def test_a_process_without_rows_holds_the_names_of_the_others(rule):
    """The collective of the metrics needs the same names everywhere."""
    training, rollout = log_probs()
    whole = run(training, rollout, mask_of("right"), rule)

    def work(rank, reduce):
        rows = slice(0, 6 * rank)
        found = run(
            training[rows], rollout[rows], mask_of("right")[rows], rule, all_reduce=reduce["sum"]
        )
        return found.metrics.compute(reduce["sum"], reduce["max"])

    for values in on_shards(2, work):
        assert values == pytest.approx(whole.metrics.compute(), rel=0, abs=1e-12)


@pytest.mark.parametrize("rule", [*SHARDED, *NORMALISED])
@pytest.mark.parametrize("scale", [1e-6, 0.5])
@pytest.mark.parametrize(
    "parts", [[slice(0, 2), slice(2, 6)], [slice(0, 1), slice(1, 2), slice(2, 6)]]
)
def test_processes_change_neither_weights_mask_nor_metrics(rule, scale, parts):
    """The second row is empty, so one of three processes has no step at all."""
    training, rollout = log_probs(scale)
    mask = mask_of("empty")
    whole = run(training, rollout, mask, rule)

    def work(rank, reduce):
        rows = parts[rank]
        found = run(training[rows], rollout[rows], mask[rows], rule, all_reduce=reduce["sum"])
        return found, found.metrics.compute(reduce["sum"], reduce["max"])

    shards = on_shards(len(parts), work)
    assert torch.equal(torch.cat([found.mask for found, _ in shards]), whole.mask)
    if whole.weights is not None:
        weights = torch.cat([found.weights for found, _ in shards])
        torch.testing.assert_close(weights, whole.weights, rtol=0, atol=1e-12)
    for _, values in shards:
        assert values == pytest.approx(whole.metrics.compute(), rel=0, abs=1e-12)


def test_normalisation_by_the_other_shards_known_sums():
    """Another process holds 5 tokens whose weights add up to 9.5: the mean is (1 + 2 + 9.5) / 7."""
    training = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    add = torch.tensor([9.5, 5.0], dtype=torch.float64)
    found = run(
        training,
        torch.zeros_like(training),
        mask,
        Rule("token", normalise=True),
        all_reduce=lambda total: total + add,
    )
    torch.testing.assert_close(
        found.weights, torch.tensor([[1.0, 2.0]], dtype=torch.float64) * 7 / 12.5
    )


def test_the_maximum_is_the_one_of_the_global_batch():
    rollout = torch.zeros(4, 1, dtype=torch.float64)
    training = torch.tensor([[0.1], [0.2], [-0.6], [0.3]], dtype=torch.float64)
    mask = torch.ones(4, 1, dtype=torch.bool)
    bag = MetricBag()
    rule = Rule(bands=(("token_k1", 0.5, 2.0),))
    for row in range(4):
        bag.merge(
            run(training[row : row + 1], rollout[row : row + 1], mask[row : row + 1], rule).metrics,
            "actor",
        )
    values = bag.compute()
    assert values["actor/logprob_abs_diff_max"] == pytest.approx(0.6)
    assert (
        values["actor/log_ppl_diff_max"]
        == values["actor/rollout_rs_token_k1_max"]
        == pytest.approx(0.6)
    )
    assert (
        values["actor/log_ppl_diff_min"]
        == values["actor/rollout_rs_token_k1_min"]
        == pytest.approx(-0.3)
    )
    assert values["actor/rollout_is_max"] == pytest.approx(math.exp(0.3))
    assert values["actor/rollout_is_min"] == pytest.approx(math.exp(-0.6))

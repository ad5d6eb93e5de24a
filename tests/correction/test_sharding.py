"""Micro-batches and processes change neither weights nor mask nor metrics."""

import itertools

import pytest
import torch
from support.builders import log_probs, mask_of, on_shards, run
from support.oracles import Rule

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


@pytest.mark.parametrize("rule", [*SHARDED, *NORMALISED])
@pytest.mark.parametrize("scale", [1e-6, 0.5])
@pytest.mark.parametrize("cuts", [[2], [0], [1, 2]])
def test_processes_change_neither_weights_mask_nor_metrics(rule, scale, cuts):
    """The second row is empty, so one of three processes has no step at all. One of two may have
    no row; it holds the same names, which the collective of the metrics needs.
    """
    parts = [slice(*edges) for edges in itertools.pairwise([0, *cuts, 6])]
    training, rollout = log_probs(scale)
    mask = mask_of("empty")
    whole = run(training, rollout, mask, rule)

    def work(rank, reduce):
        rows = parts[rank]
        actual = run(training[rows], rollout[rows], mask[rows], rule, all_reduce=reduce["sum"])
        return actual, actual.metrics.compute(reduce["sum"], reduce["max"])

    shards = on_shards(len(parts), work)
    assert torch.equal(torch.cat([actual.mask for actual, _ in shards]), whole.mask)
    if whole.weights is not None:
        weights = torch.cat([actual.weights for actual, _ in shards])
        torch.testing.assert_close(weights, whole.weights, rtol=0, atol=1e-12)
    for _, values in shards:
        assert values == pytest.approx(whole.metrics.compute(), rel=0, abs=1e-12)

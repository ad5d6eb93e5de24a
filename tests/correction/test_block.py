"""A batch is corrected in blocks of rows; where a block ends changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import (
    assert_same_correction,
    log_probs,
    mask_of,
    rule_of,
    run,
)
from support.oracles import LEVELS, Rule

from flowgrpo_rc.correction import correct as module


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("elements", [1, 8, 12, 16])
@pytest.mark.parametrize("masking", ["right", "empty"])
def test_the_borders_of_blocks_change_nothing(monkeypatch, level, elements, masking):
    """Blocks of 1, 2, 3 and 4 of the 6 rows; one step is not finite."""
    training, rollout = log_probs(seed=5)
    training[3, 0] = math.nan
    rule = rule_of(
        level,
        "mask",
        bands=(("seq_mean_k1", 0.6, 1.7), ("token_k3", 0.0, 0.5)),
        veto=0.3,
        normalise=True,
    )
    whole = run(training, rollout, mask_of(masking), rule)
    monkeypatch.setitem(module._BLOCK, "cpu", elements)
    assert_same_correction(run(training, rollout, mask_of(masking), rule), whole)


def test_copies_of_a_batch_in_several_blocks_have_its_weights_and_means():
    """Weights and mask repeat, and the means are those of the 6 rows."""
    training, rollout = log_probs()
    mask, rule = mask_of("right"), Rule("sequence", bands=(("seq_mean_k1", 0.7, 1.5),))
    copies = module._BLOCK["cpu"] // mask.numel() + 100
    small = run(training, rollout, mask, rule)
    large = run(*(x.repeat(copies, 1) for x in (training, rollout, mask)), rule)
    assert torch.equal(large.mask, small.mask.repeat(copies, 1))
    assert torch.equal(large.weights, small.weights.repeat(copies, 1))
    values, expect = large.metrics.compute(), small.metrics.compute()
    assert values.keys() == expect.keys()
    same = {name for name in expect if not name.endswith("seq_std")}
    assert {n: values[n] for n in same} == pytest.approx(
        {n: expect[n] for n in same}, rel=1e-10, abs=1e-12
    )
    for name in expect.keys() - same:
        assert values[name] == pytest.approx(expect[name] * math.sqrt(5 / 6), rel=1e-3)

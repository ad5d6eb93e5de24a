"""Rejection criteria and the veto, against the decimal formulas of `oracles`."""

import itertools
import math

import pytest
import torch
from support import oracles
from support.builders import (
    MASKS,
    expected,
    log_probs,
    mask_of,
    run,
    tensor,
)
from support.oracles import CRITERIA, LEVELS, Rule


def band(criterion, difference, valid):
    """Returns a band that keeps some steps and rejects others; no value is equal to a bound."""
    rows = [
        oracles.statistic(criterion, oracles.chosen(*pair))
        for pair in zip(difference, valid, strict=True)
    ]
    cut = [
        (a + b) / 2 for a, b in itertools.pairwise(sorted({value for row in rows for value in row}))
    ]
    low = cut[int(0.25 * len(cut))]
    high = cut[int(0.7 * len(cut))]
    return (
        (criterion, math.exp(-high), math.exp(-low))
        if criterion.endswith("k1")
        else (criterion, 0.0, high)
    )


SEVERAL = ("token_k2", "seq_mean_k1", "seq_max_k3")


@pytest.mark.parametrize("criteria", [*((name,) for name in CRITERIA), SEVERAL])
@pytest.mark.parametrize("level", [None, "sequence"])
@pytest.mark.parametrize("masking", ["right", "empty", "holes"])
def test_every_criterion_at_every_level_and_padding(criteria, level, masking):
    training, rollout = log_probs(seed=3)
    mask = mask_of(masking)
    given = ((training - rollout).tolist(), mask.tolist())
    rule = Rule(level, bands=tuple(band(criterion, *given) for criterion in criteria))
    actual = run(training, rollout, mask, rule)
    expect = expected(training, rollout, mask, rule)
    assert actual.mask.tolist() == expect.kept
    assert 0 < actual.mask.sum() < mask.sum()
    assert actual.metrics.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)
    assert (actual.weights is None) == (level is None)


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_mean_k3"])
def test_a_veto_rejects_the_sequence_of_any_step_below_it(level, masking, criterion):
    training, rollout = log_probs(seed=1)
    mask = mask_of(masking)
    bands = (
        ()
        if criterion is None
        else (band(criterion, (training - rollout).tolist(), mask.tolist()),)
    )
    lowest = sorted((training - rollout)[mask].tolist())
    rule = Rule(level, bands=bands, veto=math.exp((lowest[1] + lowest[2]) / 2))
    actual = run(training, rollout, mask, rule)
    expect = expected(training, rollout, mask, rule)
    assert actual.mask.tolist() == expect.kept
    values = actual.metrics.compute()
    assert values == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)
    assert values["rollout_is_catastrophic_token_fraction"] == pytest.approx(2 / mask.sum().item())
    assert 0 < values["rollout_is_veto_fraction"] < 1


@pytest.mark.parametrize(
    ("ratio", "threshold", "vetoed"),
    [
        (1e-5, 1e-4, True),
        (1.1e-4, 1e-4, False),
        (1e4, 1e-4, False),
        (1e-30, 1e-20, True),
        (1e-19, 1e-20, False),
    ],
)
def test_a_veto_reads_the_ratio_without_the_safety_bound(ratio, threshold, vetoed):
    """exp(-20) is 2e-9, so a bounded ratio could never be below 1e-20."""
    training = tensor([[0.0, math.log(ratio), 0.1], [0.0, 0.0, 0.0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    actual = run(training, torch.zeros_like(training), mask, Rule("token", veto=threshold))
    assert actual.mask.tolist() == [[not vetoed] * 3, [True] * 3]
    values = actual.metrics.compute()
    assert values["rollout_is_veto_fraction"] == vetoed / 2
    assert values["rollout_is_catastrophic_token_fraction"] == vetoed / 6
    assert actual.weights[0, 0] == 1


@pytest.mark.parametrize("veto", [None, 1e-4])
@pytest.mark.parametrize(
    ("training_value", "rollout_value", "below"),
    [(-math.inf, 0.0, True), (0.0, math.inf, True), (math.nan, 0.0, False), (math.inf, 0.0, False)],
)
def test_a_step_that_the_training_policy_cannot_take_is_catastrophic(
    training_value, rollout_value, below, veto
):
    training, rollout = torch.zeros(2, 3, 2, dtype=torch.float64)
    training[1, 1] = training_value
    rollout[1, 1] = rollout_value
    actual = run(training, rollout, torch.ones(3, 2, dtype=torch.bool), Rule("token", veto=veto))
    vetoed = below and veto is not None
    assert actual.mask.tolist() == [[True, True], [not vetoed, False], [True, True]]
    assert actual.metrics.compute()["rollout_is_veto_fraction"] == pytest.approx(vetoed / 3)

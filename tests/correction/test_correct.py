"""Importance weights, rejection and what is not finite, against the decimal formulas of
`oracles`.
"""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
from support import oracles
from support.builders import (
    MASKS,
    diffusion_batch,
    expected,
    log_probs,
    mask_of,
    run,
    settings,
    token_batch,
)
from support.oracles import CRITERIA, LEVELS, Rule

from flowgrpo_rc import (
    RolloutCorrectionConfig,
    apply_bypass_mode,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_batch,
    apply_rollout_correction_to_diffusion_batch,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from flowgrpo_rc.correction.correct import Corrector

WIDE = 1e30  # a bound that truncates nothing


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def band(criterion, difference, valid):
    """A band that keeps some steps and rejects others, not touching any value."""
    rows = [
        oracles.statistic(criterion, oracles.chosen(*pair))
        for pair in zip(difference, valid, strict=True)
    ]
    cut = [
        (a + b) / 2 for a, b in itertools.pairwise(sorted({value for row in rows for value in row}))
    ]
    low, high = cut[int(0.25 * len(cut))], cut[int(0.7 * len(cut))]
    return (
        (criterion, math.exp(-high), math.exp(-low))
        if criterion.endswith("k1")
        else (criterion, 0.0, high)
    )


# --- Weights


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("upper", [1.2, 100.0])
def test_weights(level, masking, upper):
    training, rollout = log_probs()
    mask, rule = mask_of(masking), Rule(level, upper=upper)
    found = run(training, rollout, mask, rule)
    expect = tensor(expected(training, rollout, mask, rule).weights)
    torch.testing.assert_close(found.weights, expect, rtol=1e-13, atol=0)
    assert torch.equal(found.mask, mask)
    assert torch.count_nonzero(found.weights[~mask]) == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("drift", "bound"), [(30.0, 20.0), (-30.0, -20.0), (1000.0, 20.0), (-1000.0, -20.0)]
)
def test_weights_stay_inside_the_safety_bound(level, drift, bound):
    training, mask = (
        torch.full((2, 3), drift, dtype=torch.float64),
        torch.ones(2, 3, dtype=torch.bool),
    )
    found = run(training, torch.zeros_like(training), mask, Rule(level, upper=WIDE))
    torch.testing.assert_close(
        found.weights, torch.full_like(training, math.exp(bound)), rtol=1e-13, atol=0
    )
    values = found.metrics.compute()
    assert all(
        math.isfinite(value)
        for name, value in values.items()
        if name.startswith(("rollout_is", "chi2"))
    )


@pytest.mark.parametrize(
    ("level", "whole"), [("sequence", [1, 30, 1, -40]), ("geometric", [0.5, 15, 0.5, -20])]
)
def test_the_safety_bound_holds_for_the_aggregate_and_not_for_its_factors(level, whole):
    """Factors e^15 and e^-14 multiply to e, and e^15 twice is bounded to e^20."""
    training = tensor([[15, -14], [15, 15], [30, -29], [-40, 0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    found = run(training, torch.zeros_like(training), mask, Rule(level, upper=WIDE))
    expect = tensor([math.exp(min(max(x, -20), 20)) for x in whole])
    torch.testing.assert_close(found.weights[:, 0], expect, rtol=1e-7, atol=0)


@pytest.mark.parametrize("drift", [-0.7, -1e-4, 1e-8, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("level", LEVELS)
def test_an_injected_drift_gives_the_closed_form_weight(drift, level):
    _, rollout = log_probs()
    lengths = mask_of("right").sum(1).double()
    found = run(rollout + drift, rollout, mask_of("right"), Rule(level))
    exponent = drift * (lengths if level == "sequence" else torch.ones_like(lengths))
    torch.testing.assert_close(
        found.weights[:, 0], torch.exp(exponent).clamp(max=2.0), rtol=1e-12, atol=0
    )
    assert found.metrics.compute()["kl"] == pytest.approx(-drift, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_on_policy_weights_are_exactly_one_and_nothing_is_rejected(dtype, level, masking):
    _, rollout = log_probs()
    mask = mask_of(masking)
    narrow = tuple((name, 1 - 1e-12, 1 + 1e-12) for name in CRITERIA)
    found = run(
        rollout.to(dtype),
        rollout.to(dtype),
        mask,
        Rule(level, bands=narrow, veto=0.999999, normalise=True),
    )
    assert found.weights.dtype == dtype
    assert torch.equal(found.weights, mask.to(dtype))
    assert torch.equal(found.mask, mask)
    values = found.metrics.compute()
    ones = {
        "rollout_is_mean",
        "rollout_is_eff_sample_size",
        "ppl_ratio",
        "rollout_is_batch_norm_factor",
    }
    assert {values[name] for name in ones} == {1}
    zeros = [
        name
        for name in values
        if name.startswith(("kl", "k3", "chi2", "rollout_rs", "logprob", "log_ppl"))
    ]
    assert {values[name] for name in [*zeros, "rollout_is_std", "rollout_is_veto_fraction"]} == {0}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_batch_normalisation_divides_bounded_weights_by_their_mean(level, masking):
    training, rollout = log_probs()
    mask = mask_of(masking)
    rule = Rule(level, upper=1.3, normalise=True)
    found, expect = run(training, rollout, mask, rule), expected(training, rollout, mask, rule)
    torch.testing.assert_close(found.weights, tensor(expect.weights), rtol=1e-13, atol=0)
    values = found.metrics.compute()
    factor = expect.metrics["rollout_is_batch_norm_factor"]
    assert values["rollout_is_batch_norm_factor"] == pytest.approx(factor, rel=1e-13)
    assert abs(factor - 1) > 1e-3
    assert oracles.normaliser(level, found.weights.tolist(), mask.tolist()) == pytest.approx(
        1, abs=1e-13
    )


def test_batch_normalisation_by_hand_counts_tokens_or_sequences():
    """Ratios 2 | 1, 1, 1: tokens have mean 5/4, sequences (2 + 1)/2, the products the same here."""
    training = tensor([[math.log(2), 0, 0], [0, 0, 0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    for level, mean in (("token", 5 / 4), ("sequence", 3 / 2), ("geometric", 3 / 2)):
        found = run(training, torch.zeros_like(training), mask, Rule(level, normalise=True))
        torch.testing.assert_close(found.weights[:, 0], tensor([2 / mean, 1 / mean]))


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_carries_a_gradient(level):
    training, rollout = log_probs()
    training.requires_grad_()
    rollout.requires_grad_()
    mask = mask_of("full")
    found = run(
        training,
        rollout,
        mask,
        Rule(level, bands=(("token_k1", 0.7, 1.5),), veto=0.5, normalise=True),
    )
    assert not found.weights.requires_grad
    assert not found.mask.requires_grad
    assert not compute_rollout_correction_weights(
        training - rollout, mask, rollout_is=level
    ).requires_grad


# --- Rejection


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("masking", MASKS)
def test_every_criterion_at_every_level_and_padding(criterion, level, masking):
    training, rollout = log_probs(seed=3)
    mask = mask_of(masking)
    rule = Rule(level, bands=(band(criterion, (training - rollout).tolist(), mask.tolist()),))
    found, expect = run(training, rollout, mask, rule), expected(training, rollout, mask, rule)
    assert found.mask.tolist() == expect.kept
    assert 0 < found.mask.sum() < mask.sum()
    assert found.metrics.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)
    assert (found.weights is None) == (level is None)


@pytest.mark.parametrize("criterion", [name for name in CRITERIA if name.endswith("k1")])
@pytest.mark.parametrize(
    ("ratio", "keeps"), [(3.0, True), (1 / 3, False), (0.6, True), (5.0, False)]
)
def test_an_asymmetric_band_is_on_training_over_rollout(criterion, ratio, keeps):
    """verl compares the inverse ratio (its issue 6377): 3 lies in 0.5_4, 1/3 does not."""
    difference = torch.full((1, 1), math.log(ratio))
    kept = compute_rollout_rejection_mask(
        difference, torch.ones(1, 1), rollout_rs=criterion, rollout_rs_threshold="0.5_4.0"
    )
    assert bool(kept) is keeps


def test_several_criteria_keep_what_all_of_them_keep():
    training, rollout = log_probs(seed=3)
    mask = mask_of("right")
    difference, valid = (training - rollout).tolist(), mask.tolist()
    bands = tuple(
        band(name, difference, valid) for name in ("token_k2", "seq_mean_k1", "seq_max_k3")
    )
    rule = Rule("geometric", bands=bands)
    found, expect = run(training, rollout, mask, rule), expected(training, rollout, mask, rule)
    parts = [torch.tensor(oracles.kept(*one, difference, valid)) for one in bands]
    assert torch.equal(found.mask, parts[0] & parts[1] & parts[2])
    assert not any(torch.equal(found.mask, part) for part in parts)
    assert found.metrics.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_step_under_the_padding_judges_nobody(criterion):
    training, rollout = log_probs(scale=1e-3)
    mask = mask_of("right")
    wild = torch.where(mask, training, training - 50)
    wild[1, 3], wild[2, 2], wild[2, 3] = math.nan, math.inf, -math.inf
    rule = Rule("sequence", bands=((criterion, 1 / 1.5, 1.5),), veto=1e-3)
    found, quiet = (run(x, rollout, mask, rule) for x in (wild, training))
    assert torch.equal(found.mask, mask)
    assert torch.equal(found.weights, quiet.weights)
    assert found.metrics.compute() == quiet.metrics.compute()


# --- The veto


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
    found, expect = run(training, rollout, mask, rule), expected(training, rollout, mask, rule)
    assert found.mask.tolist() == expect.kept
    values = found.metrics.compute()
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
    """exp(-20) is 2e-9: a bounded ratio could never be below 1e-20."""
    training = tensor([[0.0, math.log(ratio), 0.1], [0.0, 0.0, 0.0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = run(training, torch.zeros_like(training), mask, Rule("token", veto=threshold))
    assert found.mask.tolist() == [[not vetoed] * 3, [True] * 3]
    values = found.metrics.compute()
    assert values["rollout_is_veto_fraction"] == vetoed / 2
    assert values["rollout_is_catastrophic_token_fraction"] == vetoed / 6
    assert found.weights[0, 0] == 1


@pytest.mark.parametrize(
    ("training_value", "rollout_value", "vetoed"),
    [(-math.inf, 0.0, True), (0.0, math.inf, True), (math.nan, 0.0, False), (math.inf, 0.0, False)],
)
def test_a_step_that_the_training_policy_cannot_take_is_catastrophic(
    training_value, rollout_value, vetoed
):
    training, rollout = (
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(3, 2, dtype=torch.float64),
    )
    training[1, 1], rollout[1, 1] = training_value, rollout_value
    found = run(training, rollout, torch.ones(3, 2, dtype=torch.bool), Rule("token", veto=1e-4))
    assert found.mask.tolist() == [[True, True], [not vetoed, False], [True, True]]
    assert found.metrics.compute()["rollout_is_veto_fraction"] == pytest.approx(vetoed / 3)
    without = run(training, rollout, torch.ones(3, 2, dtype=torch.bool), Rule("token"))
    assert without.mask.tolist() == [[True, True], [True, False], [True, True]]
    assert without.metrics.compute()["rollout_is_veto_fraction"] == 0


# --- What is not finite

BAD = [
    (math.nan, 0.0),
    (0.0, math.nan),
    (math.inf, 0.0),
    (-math.inf, 0.0),
    (0.0, -math.inf),
    (-math.inf, -math.inf),
    (math.inf, math.inf),
]


@pytest.mark.parametrize(("training_value", "rollout_value"), BAD)
@pytest.mark.parametrize("rule", [Rule(), Rule("token"), Rule("sequence", normalise=True)])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_sum_k3", "seq_max_k2"])
def test_a_row_that_is_not_finite_is_rejected_and_counted_nowhere_else(
    training_value, rollout_value, rule, criterion
):
    training, rollout = log_probs(shape=(6, 1))
    training[2], rollout[2] = training_value, rollout_value
    mask = torch.ones(6, 1, dtype=torch.bool)
    rule = rule._replace(bands=() if criterion is None else ((criterion, 0.6, 1.8),))
    others = torch.tensor([0, 1, 3, 4, 5])
    found = run(training, rollout, mask, rule)
    clean = run(training[others], rollout[others], mask[others], rule)
    assert not found.mask[2].any()
    assert torch.equal(found.mask[others], clean.mask)
    if rule.level is not None:
        assert found.weights[2].item() == 0
        torch.testing.assert_close(found.weights[others], clean.weights, rtol=1e-14, atol=0)
    values, expect = found.metrics.compute(), clean.metrics.compute()
    assert all(math.isfinite(value) for value in values.values())
    totals = [
        f"rollout_{kind}_{unit}masked_fraction" for kind in ("is", "rs") for unit in ("", "seq_")
    ]
    for name in [*totals, "rejected_ratio"]:
        assert values.pop(name) == pytest.approx((5 * expect.pop(name) + 1) / 6, abs=1e-14)
    assert values.pop("rollout_rs_nonfinite_fraction") == pytest.approx(1 / 6)
    assert expect.pop("rollout_rs_nonfinite_fraction") == 0
    assert values == pytest.approx(expect, abs=1e-14)


@pytest.mark.parametrize(("training_value", "rollout_value"), BAD)
def test_the_public_helpers_reject_what_is_not_finite(training_value, rollout_value):
    training, rollout = log_probs(shape=(4, 1))
    training[1], rollout[1] = training_value, rollout_value
    mask, others = torch.ones(4, 1), [0, 2, 3]
    values = compute_offpolicy_metrics(training, rollout, mask)
    assert values == compute_offpolicy_metrics(training[others], rollout[others], mask[others])
    difference = training - rollout
    for level in LEVELS:
        weights = compute_rollout_correction_weights(difference, mask, rollout_is=level)
        assert weights[1].item() == 0
        assert torch.isfinite(weights).all()
    kept = compute_rollout_rejection_mask(
        difference, mask, rollout_rs="token_k2", rollout_rs_threshold=1e9
    )
    assert kept.flatten().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_bad_step_rejects_itself_and_under_a_sequence_criterion_its_sequence(bad, criterion):
    difference = tensor([[0.1, bad, 0.0], [0.1, 0.2, 0.0]])
    zero, mask = torch.zeros_like(difference), torch.ones(2, 3, dtype=torch.bool)
    spec = "0.5_2.0" if criterion.endswith("k1") else "2.0"
    expect = [[criterion.startswith("token"), False, criterion.startswith("token")], [True] * 3]
    rule = Rule("sequence", bands=((criterion, 0.5, 2.0),))
    found = run(difference, zero, mask, rule)
    assert found.mask.tolist() == expect
    assert found.metrics.compute() == pytest.approx(
        expected(difference, zero, mask, rule).metrics, abs=1e-12
    )
    torch.testing.assert_close(found.weights[0], tensor([math.exp(0.1), 0, math.exp(0.1)]))
    helper = compute_rollout_rejection_mask(
        difference, mask, rollout_rs=criterion, rollout_rs_threshold=spec
    )
    assert helper.tolist() == expect


def test_nothing_finite_at_all():
    training = torch.full((3, 2), math.nan)
    found = run(
        training,
        torch.zeros(3, 2),
        torch.ones(3, 2, dtype=torch.bool),
        Rule("token", normalise=True),
    )
    assert torch.count_nonzero(found.weights) == 0
    assert not found.mask.any()
    values = found.metrics.compute()
    assert values["rollout_rs_nonfinite_fraction"] == 1
    assert values["rollout_rs_masked_fraction"] == 1
    assert all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("drift", [-5000.0, -800.0, 800.0, 5000.0])
def test_a_huge_but_finite_gap_breaks_no_metric(drift):
    """A diverged policy must show in the metrics and not end the run with an OverflowError."""
    training, rollout = log_probs()
    found = compute_rollout_correction_and_rejection_mask(
        training + drift, rollout, mask_of("full")
    )
    assert not [name for name, value in found.metrics.items() if math.isnan(value)]
    assert found.metrics["rollout_corr/log_ppl_diff"] == pytest.approx(-drift, rel=1e-3)


# --- The public functions


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_the_public_entry_is_the_core_with_a_prefix(mask_dtype):
    training, rollout = log_probs()
    mask = mask_of("left")
    rule = Rule("sequence", bands=(("seq_mean_k1", 0.8, 1.3),), veto=0.4, normalise=True)
    core = run(training, rollout, mask, rule)
    weights, kept, values = compute_rollout_correction_and_rejection_mask(
        training, rollout, mask.to(mask_dtype), **settings(rule)
    )
    assert torch.equal(weights, core.weights)
    assert torch.equal(kept, core.mask.to(mask_dtype))
    assert kept.dtype == mask_dtype
    assert values == {
        f"rollout_corr/{name}": value for name, value in core.metrics.compute().items()
    }


def test_the_smaller_helpers_agree_with_the_entry():
    training, rollout = log_probs()
    mask = mask_of("right")
    whole = compute_rollout_correction_and_rejection_mask(
        training,
        rollout,
        mask,
        rollout_is="sequence",
        rollout_rs="token_k1",
        rollout_rs_threshold="0.7_1.5",
    )
    difference = training - rollout
    assert torch.equal(
        compute_rollout_correction_weights(difference, mask, rollout_is="sequence"), whole.weights
    )
    kept = compute_rollout_rejection_mask(
        difference, mask, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.5"
    )
    assert torch.equal(kept, whole.mask)
    for name, value in compute_offpolicy_metrics(training, rollout, mask).items():
        assert whole.metrics[f"rollout_corr/{name}"] == value


@pytest.mark.parametrize("level", ["geo", "seq", "Token", ""])
def test_an_unknown_level_is_refused_and_not_taken_for_the_sequence(level):
    with pytest.raises(ValueError, match="rollout_is") as error:
        compute_rollout_correction_weights(torch.zeros(2, 2), torch.ones(2, 2), rollout_is=level)
    assert "token" in str(error.value)
    with pytest.raises(ValueError, match="rollout_is"):
        compute_rollout_correction_and_rejection_mask(*[torch.zeros(2, 2)] * 3, rollout_is=level)


@pytest.mark.parametrize(
    "shapes", [[(2, 3), (2, 3), (2, 2)], [(2, 3), (1, 3), (2, 3)], [(3,), (3,), (3,)]]
)
def test_shapes_must_agree(shapes):
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        compute_rollout_correction_and_rejection_mask(*[torch.zeros(shape) for shape in shapes])


def test_the_defaults_are_the_documented_ones():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(
            compute_rollout_correction_and_rejection_mask
        ).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and name != "step_kl"  # which is data, not a setting
    }
    assert defaults == {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_mode": None,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "rollout_rs_threshold_lower": None,
        "rollout_token_veto_threshold": None,
        "normalize": None,
    }
    config = RolloutCorrectionConfig()
    assert {name: getattr(config, name) for name in defaults} == defaults


def test_the_example_of_the_usage_document():
    """Its call, with names and thresholds as printed there, and every metric that its code
    reads.
    """
    training, rollout = log_probs()
    found = compute_rollout_correction_and_rejection_mask(
        old_log_prob=training,
        rollout_log_prob=rollout,
        response_mask=mask_of("right").long(),
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token",
        rollout_rs_threshold=2.0,
        rollout_rs_threshold_lower=0.5,
        rollout_token_veto_threshold=1e-4,
    )
    expect = expected(
        training,
        rollout,
        mask_of("right"),
        Rule("token", bands=(("token_k1", 0.5, 2.0),), veto=1e-4),
    )
    assert found.mask.bool().tolist() == expect.kept
    for name in (
        "is_mean",
        "is_eff_sample_size",
        "is_veto_fraction",
        "is_masked_fraction",
        "is_std",
    ):
        assert found.metrics[f"rollout_corr/rollout_{name}"] == pytest.approx(
            expect.metrics[f"rollout_{name}"]
        )


# --- Batches


def test_bypass_takes_the_rollout_as_old():
    _, rollout = log_probs()
    for batch, apply in (
        (diffusion_batch(rollout, old_log_probs=rollout + 1), apply_bypass_mode_to_diffusion_batch),
        (token_batch(rollout, mask_of("right"), old_log_probs=rollout + 1), apply_bypass_mode),
    ):
        assert torch.equal(apply(batch).old_log_probs, rollout)
        assert torch.equal(batch.old_log_probs, rollout + 1)


def test_missing_log_probs_say_how_to_get_them():
    _, rollout = log_probs()
    without = diffusion_batch(None, shape=(6, 4), old_log_probs=rollout)
    config = RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs"):
        apply_bypass_mode_to_diffusion_batch(without)
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs"):
        apply_rollout_correction_to_diffusion_batch(without, config)
    with pytest.raises(ValueError, match="old_log_probs"):
        apply_rollout_correction_to_diffusion_batch(diffusion_batch(rollout), config)


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("text", [False, True])
def test_the_decoupled_correction_of_a_batch_is_old_over_rollout(level, text):
    old, rollout = log_probs()
    rule = Rule(level, bands=(("seq_mean_k1", 0.8, 1.3),), veto=0.3, normalise=level is not None)
    mask = mask_of("right" if text else "full")
    full = (
        token_batch(rollout, mask, old_log_probs=old)
        if text
        else diffusion_batch(rollout, old_log_probs=old)
    )
    apply = (
        apply_rollout_correction_to_batch if text else apply_rollout_correction_to_diffusion_batch
    )
    batch, bag = apply(full, RolloutCorrectionConfig(**settings(rule)))
    expect = expected(old, rollout, mask, rule)
    assert batch.rejection_mask.tolist() == expect.kept
    assert (batch.rollout_is_weights is None) == (level is None)
    if level is not None:
        torch.testing.assert_close(
            batch.rollout_is_weights, tensor(expect.weights), rtol=1e-12, atol=0
        )
    assert bag.compute() == pytest.approx(expect.metrics, rel=1e-10, abs=1e-12)
    assert torch.equal(batch.old_log_probs, old)


def test_rollout_equal_to_old_is_left_alone():
    _, rollout = log_probs()
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
    )
    batch, _ = apply_rollout_correction_to_diffusion_batch(
        diffusion_batch(rollout, old_log_probs=rollout), config
    )
    assert torch.equal(batch.rollout_is_weights, torch.ones_like(rollout))
    assert batch.rejection_mask.all()


def test_in_single_steps_all_levels_are_the_same():
    """Bypass corrects [B, 1]: the document calls all rejection modes equivalent there."""
    training, rollout = log_probs(shape=(30, 1))
    mask = torch.ones(30, 1, dtype=torch.bool)
    for estimator, bounds in (("k1", (0.7, 1.4)), ("k2", (0, 0.1)), ("k3", (0, 0.1))):
        names = [name for name in CRITERIA if name.endswith(estimator)]
        masks = [
            run(training, rollout, mask, Rule(bands=((name, *bounds),))).mask for name in names
        ]
        assert 0 < masks[0].sum() < 30
        assert all(torch.equal(other, masks[0]) for other in masks)
    first, *others = [run(training, rollout, mask, Rule(level)).weights for level in LEVELS]
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_corrector_reads_every_setting_of_the_config(normalise):
    training, rollout = log_probs()
    rule = Rule(
        "token",
        "clip",
        0.9,
        1.25,
        (("token_k1", 0.8, 1.2),),
        veto=0.5,
        normalise=normalise,
        over_kept=True,
    )
    config = RolloutCorrectionConfig(**settings(rule._replace(normalise=True)))
    found = Corrector(config)(training, rollout, mask_of("left"), normalise=normalise)
    expect = expected(training, rollout, mask_of("left"), rule)
    torch.testing.assert_close(found.weights, tensor(expect.weights), rtol=1e-12, atol=0)
    assert found.mask.tolist() == expect.kept

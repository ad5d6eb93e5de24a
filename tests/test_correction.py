"""Importance weights, rejection and diagnostics against the decimal formulas of `oracles`."""

from __future__ import annotations

import inspect
import itertools
import math

import oracles
import pytest
import torch
from oracles import CRITERIA, LEVELS, MASKS, diffusion_batch, log_probs, mask_of
from oracles import correct_with_defaults as run

from flowgrpo_rc import (
    RolloutCorrectionConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction.bands import parse_bands
from flowgrpo_rc.correction.correct import correct_with


def threshold(criterion: str, difference: list[list[float]], valid: list[list[bool]]) -> tuple[str, float, float]:
    """A spec and its bounds that keep some steps and reject others, not touching any value."""
    values = oracles.statistic(criterion, difference, valid)
    flat = sorted({value for row, ok in zip(values, valid, strict=True) for value in oracles.chosen(row, ok)})
    cut = [(a + b) / 2 for a, b in itertools.pairwise(flat)]
    high = cut[int(0.7 * len(cut))]
    if not criterion.endswith("k1"):
        return repr(high), -math.inf, high
    low = cut[int(0.25 * len(cut))]
    return f"{math.exp(low)!r}_{math.exp(high)!r}", math.exp(low), math.exp(high)


# Weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("upper", [1.2, 2.0, 100.0])
def test_weights(level, masking, upper):
    training, rollout = log_probs()
    mask = mask_of(masking)
    found = run(training, rollout, mask, rollout_is=level, rollout_is_threshold=upper)
    expect = oracles.weights(level, upper, (training - rollout).tolist(), mask.tolist())
    torch.testing.assert_close(found.weights, torch.tensor(expect, dtype=torch.float64), rtol=1e-13, atol=0)
    assert torch.equal(found.mask, mask)
    assert torch.count_nonzero(found.weights[~mask]) == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("drift", "bound"), [(30.0, 20.0), (-30.0, -20.0), (1000.0, 20.0), (-1000.0, -20.0)])
def test_weights_stay_inside_the_safety_bound(level, drift, bound):
    training, rollout = torch.full((2, 3), drift, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = run(training, rollout, mask, rollout_is=level, rollout_is_threshold=1e30)
    expect = torch.full((2, 3), math.exp(bound), dtype=torch.float64)
    torch.testing.assert_close(found.weights, expect, rtol=1e-13, atol=0)
    values = found.metrics.compute()
    assert all(math.isfinite(value) for name, value in values.items() if name.startswith(("rollout_is", "chi2")))


def test_the_safety_bound_holds_for_the_product_and_not_for_its_factors():
    """Factors e^15 and e^-14 multiply to e, and e^15 twice is bounded to e^20."""
    training = torch.tensor([[15.0, -14.0], [15.0, 15.0], [30.0, -29.0]], dtype=torch.float64)
    mask = torch.ones(3, 2, dtype=torch.bool)
    found = run(training, torch.zeros_like(training), mask, rollout_is="sequence", rollout_is_threshold=1e30)
    expect = torch.tensor([math.e, math.exp(20), math.e], dtype=torch.float64)
    torch.testing.assert_close(found.weights[:, 0], expect, rtol=1e-14, atol=0)


@pytest.mark.parametrize("drift", [-0.7, -1e-4, 1e-8, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("level", LEVELS)
def test_an_injected_drift_gives_the_closed_form_weight(drift, level):
    _, rollout = log_probs()
    lengths = mask_of("right").sum(1).double()
    found = run(rollout + drift, rollout, mask_of("right"), rollout_is=level, rollout_is_threshold=2.0)
    exponent = drift * (lengths if level == "sequence" else torch.ones_like(lengths))
    expect = torch.exp(exponent).clamp(max=2.0)
    torch.testing.assert_close(found.weights[:, 0], expect, rtol=1e-12, atol=0)
    assert found.metrics.compute()["kl"] == pytest.approx(-drift, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_on_policy_weights_are_exactly_one_and_nothing_is_rejected(dtype, level, masking):
    _, rollout = log_probs()
    mask = mask_of(masking)
    bands = parse_bands(",".join(CRITERIA), [1 + 1e-12 if name.endswith("k1") else 1e-30 for name in CRITERIA])
    settings = {"rollout_is": level, "bands": bands, "batch_normalize": True}
    found = run(rollout.to(dtype), rollout.to(dtype), mask, **settings)
    assert found.weights.dtype == dtype
    assert torch.equal(found.weights, mask.to(dtype))
    assert torch.equal(found.mask, mask)
    values = found.metrics.compute()
    for name in ("rollout_is_std", "kl", "k3_kl", "chi2_token", "chi2_seq", "rollout_rs_masked_fraction"):
        assert values[name] == 0
    for name in ("rollout_is_mean", "rollout_is_eff_sample_size", "ppl_ratio", "rollout_is_batch_norm_factor"):
        assert values[name] == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masking", MASKS)
def test_batch_normalisation_divides_truncated_weights_by_their_mean(level, masking):
    training, rollout = log_probs()
    mask = mask_of(masking)
    found = run(training, rollout, mask, rollout_is=level, rollout_is_threshold=1.3, batch_normalize=True)
    plain = oracles.weights(level, 1.3, (training - rollout).tolist(), mask.tolist())
    factor = oracles.normaliser(level, plain, mask.tolist())
    expect = torch.tensor(plain, dtype=torch.float64) / factor
    torch.testing.assert_close(found.weights, expect, rtol=1e-13, atol=0)
    values = found.metrics.compute()
    assert values["rollout_is_batch_norm_factor"] == pytest.approx(factor, rel=1e-13)
    assert values["rollout_is_max"] <= 1.3
    assert oracles.normaliser(level, found.weights.tolist(), mask.tolist()) == pytest.approx(1, abs=1e-13)


def test_the_two_levels_of_batch_normalisation_differ_where_lengths_do():
    training, rollout = log_probs()
    factors = []
    for level in LEVELS:
        found = run(training, rollout, mask_of("right"), rollout_is=level, batch_normalize=True)
        weights = oracles.weights(level, 2.0, (training - rollout).tolist(), mask_of("right").tolist())
        other = oracles.normaliser("sequence" if level == "token" else "token", weights, mask_of("right").tolist())
        factors.append(found.metrics.compute()["rollout_is_batch_norm_factor"])
        assert abs(factors[-1] - other) > 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_carries_a_gradient(level):
    training, rollout = log_probs()
    training.requires_grad_()
    rollout.requires_grad_()
    bands = parse_bands("token_k1", "0.7_1.5")
    found = run(training, rollout, mask_of("full"), rollout_is=level, batch_normalize=True, bands=bands)
    assert not found.weights.requires_grad
    assert not found.mask.requires_grad
    public = compute_rollout_correction_weights(training - rollout, mask_of("full"), rollout_is=level)
    assert not public.requires_grad
    assert isinstance(compute_offpolicy_metrics(training, rollout, mask_of("full"))["kl"], float)


# Rejection ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("masking", MASKS)
def test_every_criterion_at_every_level_and_padding(criterion, level, masking):
    training, rollout = log_probs(seed=3)
    mask = mask_of(masking)
    difference, valid = (training - rollout).tolist(), mask.tolist()
    spec, lower, upper = threshold(criterion, difference, valid)
    found = run(training, rollout, mask, rollout_is=level, bands=parse_bands(criterion, spec))
    expect = oracles.kept(criterion, lower, upper, difference, valid)
    assert found.mask.tolist() == expect
    assert 0 < found.mask.sum() < mask.sum()
    values = found.metrics.compute()
    reference = oracles.metrics(training.tolist(), rollout.tolist(), valid, expect, level=level or "token", upper=2.0)
    assert values == pytest.approx(reference, rel=1e-10, abs=1e-12)
    if level is None:
        assert found.weights is None
    else:
        weights = torch.tensor(oracles.weights(level, 2.0, difference, valid), dtype=torch.float64)
        torch.testing.assert_close(found.weights, weights, rtol=1e-13, atol=0)


@pytest.mark.parametrize("criterion", [name for name in CRITERIA if name.endswith("k1")])
@pytest.mark.parametrize(("ratio", "keeps"), [(3.0, True), (1 / 3, False), (0.6, True), (5.0, False)])
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
    specs = {name: threshold(name, difference, valid) for name in ("token_k2", "seq_mean_k1", "seq_max_k3")}
    bands = parse_bands(list(specs), [spec for spec, _, _ in specs.values()])
    found = run(training, rollout, mask, bands=bands).mask
    parts = [torch.tensor(oracles.kept(n, low, up, difference, valid)) for n, (_, low, up) in specs.items()]
    assert torch.equal(found, parts[0] & parts[1] & parts[2])
    assert not any(torch.equal(found, part) for part in parts)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_step_under_the_padding_judges_nobody(criterion):
    training, rollout = log_probs(scale=1e-3)
    mask = mask_of("right")
    wild = torch.where(mask, training, training + 50)
    wild[1, 3], wild[2, 2], wild[2, 3] = math.nan, math.inf, -math.inf
    bands = parse_bands(criterion, 1.5 if criterion.endswith("k1") else 0.1)
    found, quiet = (run(x, rollout, mask, rollout_is="sequence", bands=bands) for x in (wild, training))
    assert torch.equal(found.mask, mask)
    assert torch.equal(found.weights, quiet.weights)
    assert found.metrics.compute() == quiet.metrics.compute()


# What is not finite -------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("settings", [{}, {"rollout_is": "token"}, {"rollout_is": "sequence", "batch_normalize": True}])
@pytest.mark.parametrize("criterion", [None, "token_k1", "seq_sum_k3", "seq_max_k2"])
def test_a_row_that_is_not_finite_is_rejected_and_counted_nowhere_else(
    training_value, rollout_value, settings, criterion
):
    training, rollout = log_probs(shape=(6, 1))
    training[2], rollout[2] = training_value, rollout_value
    mask = torch.ones(6, 1, dtype=torch.bool)
    spec = None if criterion is None else "0.6_1.8" if criterion.endswith("k1") else "0.1"
    bands = parse_bands(criterion, spec)
    others = torch.tensor([0, 1, 3, 4, 5])
    found = run(training, rollout, mask, bands=bands, **settings)
    clean = run(training[others], rollout[others], mask[others], bands=bands, **settings)
    assert not found.mask[2].any()
    assert torch.equal(found.mask[others], clean.mask)
    if settings:
        assert found.weights[2].item() == 0
        torch.testing.assert_close(found.weights[others], clean.weights, rtol=1e-14, atol=0)
    values, expect = found.metrics.compute(), clean.metrics.compute()
    assert all(math.isfinite(value) for value in values.values())
    for name in [name for name in values if name.endswith("masked_fraction")]:
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
    kept = compute_rollout_rejection_mask(difference, mask, rollout_rs="token_k2", rollout_rs_threshold=1e9)
    assert kept.flatten().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_bad_step_rejects_itself_and_under_a_sequence_criterion_its_sequence(bad, criterion):
    difference = torch.tensor([[0.1, bad, 0.0], [0.1, 0.2, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    spec = "0.5_2.0" if criterion.endswith("k1") else "0.5"
    expect = [[criterion.startswith("token"), False, criterion.startswith("token")], [True] * 3]
    found = run(
        difference, torch.zeros_like(difference), mask, rollout_is="sequence", bands=parse_bands(criterion, spec)
    )
    assert found.mask.tolist() == expect
    torch.testing.assert_close(found.weights[0], torch.tensor([math.exp(0.1), 0, math.exp(0.1)], dtype=torch.float64))
    helper = compute_rollout_rejection_mask(difference, mask, rollout_rs=criterion, rollout_rs_threshold=spec)
    assert helper.tolist() == expect


def test_nothing_finite_at_all():
    training = torch.full((3, 2), math.nan)
    found = run(
        training, torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), rollout_is="token", batch_normalize=True
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
    found = compute_rollout_correction_and_rejection_mask(training + drift, rollout, mask_of("full"))
    assert not [name for name, value in found.metrics.items() if math.isnan(value)]
    assert found.metrics["rollout_corr/log_ppl_diff"] == pytest.approx(drift, rel=1e-3)


# The public functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_the_public_entry_is_the_core_with_a_prefix(mask_dtype):
    training, rollout = log_probs()
    mask = mask_of("left")
    bands = parse_bands("seq_mean_k1", "0.8_1.3")
    core = run(training, rollout, mask, rollout_is="sequence", batch_normalize=True, bands=bands)
    weights, kept, values = compute_rollout_correction_and_rejection_mask(
        training,
        rollout,
        mask.to(mask_dtype),
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.8_1.3",
    )
    assert torch.equal(weights, core.weights)
    assert torch.equal(kept, core.mask.to(mask_dtype))
    assert kept.dtype == mask_dtype
    assert values == {f"rollout_corr/{name}": value for name, value in core.metrics.compute().items()}


def test_the_smaller_helpers_agree_with_the_entry():
    training, rollout = log_probs()
    mask = mask_of("right")
    whole = compute_rollout_correction_and_rejection_mask(
        training, rollout, mask, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.5"
    )
    difference = training - rollout
    assert torch.equal(compute_rollout_correction_weights(difference, mask, rollout_is="sequence"), whole.weights)
    kept = compute_rollout_rejection_mask(difference, mask, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.5")
    assert torch.equal(kept, whole.mask)
    for name, value in compute_offpolicy_metrics(training, rollout, mask).items():
        assert whole.metrics[f"rollout_corr/{name}"] == value


@pytest.mark.parametrize("level", ["geometric", "seq", "Token", ""])
def test_an_unknown_level_is_refused_and_not_taken_for_the_sequence(level):
    with pytest.raises(ValueError, match="rollout_is") as error:
        compute_rollout_correction_weights(torch.zeros(2, 2), torch.ones(2, 2), rollout_is=level)
    assert "token" in str(error.value)
    with pytest.raises(ValueError, match="rollout_is"):
        compute_rollout_correction_and_rejection_mask(*[torch.zeros(2, 2)] * 3, rollout_is=level)


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 3), (2, 2)], [(2, 3), (1, 3), (2, 3)], [(3,), (3,), (3,)]])
def test_shapes_must_agree(shapes):
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        compute_rollout_correction_and_rejection_mask(*[torch.zeros(shape) for shape in shapes])


def test_the_defaults_are_the_documented_ones():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(compute_rollout_correction_and_rejection_mask).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    documented = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None}
    assert {name: defaults[name] for name in documented} == documented
    assert defaults["rollout_is_batch_normalize"] is False


# Batches ------------------------------------------------------------------------------------------------------------


def test_bypass_takes_the_rollout_as_old():
    _, rollout = log_probs()
    batch = diffusion_batch(rollout, old_log_probs=rollout + 1)
    assert torch.equal(apply_bypass_mode_to_diffusion_batch(batch).old_log_probs, rollout)
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
def test_the_decoupled_correction_of_a_batch_is_old_over_rollout(level):
    old, rollout = log_probs()
    normalised = level is not None
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_batch_normalize=normalised,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.8_1.3",
    )
    batch, bag = apply_rollout_correction_to_diffusion_batch(diffusion_batch(rollout, old_log_probs=old), config)
    expect = run(old, rollout, mask_of("full"), rollout_is=level, batch_normalize=normalised, bands=config.bands())
    assert torch.equal(batch.rejection_mask, expect.mask)
    assert (batch.rollout_is_weights is None) == (level is None)
    if level is not None:
        assert torch.equal(batch.rollout_is_weights, expect.weights)
    assert bag.compute() == expect.metrics.compute()
    assert torch.equal(batch.old_log_probs, old)


def test_rollout_equal_to_old_is_left_alone():
    _, rollout = log_probs()
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    batch, _ = apply_rollout_correction_to_diffusion_batch(diffusion_batch(rollout, old_log_probs=rollout), config)
    assert torch.equal(batch.rollout_is_weights, torch.ones_like(rollout))
    assert batch.rejection_mask.all()


def test_in_single_steps_all_levels_are_the_same():
    """Bypass corrects [B, 1]: the document calls all rejection modes equivalent there."""
    training, rollout = log_probs(shape=(30, 1))
    mask = torch.ones(30, 1, dtype=torch.bool)
    for estimator, spec in (("k1", "0.7_1.4"), ("k2", 0.1), ("k3", 0.1)):
        names = [name for name in CRITERIA if name.endswith(estimator)]
        masks = [run(training, rollout, mask, bands=parse_bands(name, spec)).mask for name in names]
        assert 0 < masks[0].sum() < 30
        assert all(torch.equal(other, masks[0]) for other in masks)
    weights = [run(training, rollout, mask, rollout_is=level).weights for level in LEVELS]
    assert torch.equal(*weights)


def test_correct_with_reads_every_setting_of_the_config():
    training, rollout = log_probs()
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold=1.25,
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.8_1.2",
    )
    found = correct_with(config, training, rollout, all_reduce=identity)
    settings = {"rollout_is": "token", "rollout_is_threshold": 1.25, "batch_normalize": True, "bands": config.bands()}
    expect = run(training, rollout, mask_of("full"), **settings)
    assert torch.equal(found.weights, expect.weights)
    assert torch.equal(found.mask, expect.mask)

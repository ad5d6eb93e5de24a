"""Metrics: MetricBag, the diagnostics of the correction, and both over micro-batches and
processes.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.builders import expected, log_probs, mask_of, on_shards, run
from support.oracles import LEVELS, MODES, Rule, std

from flowgrpo_rc import compute_offpolicy_metrics, compute_rollout_correction_and_rejection_mask
from flowgrpo_rc.core.kl import k1, k2, k3
from flowgrpo_rc.core.metrics import MetricBag, sample_std_from_moments, std_from_moments
from flowgrpo_rc.core.reduce import masked_mean, masked_sum

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
    found = filled(VALUES).compute()
    assert found == pytest.approx(
        {"mean": 1.875, "max": 4.0, "min": -1.0, "sum": 7.5, "std": std(VALUES.tolist())}, abs=1e-14
    )


def test_a_mask_selects():
    found = filled(VALUES, SOME).compute()
    assert (found["mean"], found["max"], found["min"]) == (3.5, 4.0, 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_out_takes_no_part(bad):
    values = torch.tensor([3.0, bad, 4.0, bad])
    found = filled(values, SOME).compute()
    assert (found["mean"], found["max"], found["min"]) == (3.5, 4.0, 3.0)


def test_adding_in_pieces_is_adding_at_once_and_not_a_mean_of_means():
    bag = MetricBag()
    for piece in (VALUES[:1], VALUES[1:]):
        bag.mean("mean", piece)
        bag.max("max", piece)
        bag.min("min", piece)
    assert bag.compute() == {"mean": 1.875, "max": 4.0, "min": -1.0}


def test_merge_with_a_prefix_keeps_derived_metrics_apart():
    bag = MetricBag()
    bag.mean("mean", torch.tensor([100.0]))
    for piece in (VALUES[:1], VALUES[1:]):
        bag.merge(filled(piece), "a/b")
    outer = MetricBag()
    outer.merge(bag, "actor")
    found = outer.compute()
    assert found["actor/a/b/std"] == pytest.approx(std(VALUES.tolist()), abs=1e-14)
    assert found["actor/mean"] == 100.0
    assert found["actor/a/b/mean"] == 1.875
    assert found["actor/a/b/sum"] == 7.5
    assert not [name for name in found if "_square" in name]


def test_merge_leaves_the_other_bag_alone():
    other, bag = filled(VALUES), MetricBag()
    bag.merge(other)
    bag.merge(other)
    bag.mean("mean", torch.tensor([50.0]))
    assert other.compute() == filled(VALUES).compute()
    assert bag.compute()["sum"] == 15.0


def test_an_empty_mask_leaves_the_metric_out():
    nothing = torch.zeros(4, dtype=torch.bool)
    found = filled(VALUES, nothing).compute()
    assert set(found) == {"sum"}
    bag = filled(VALUES, nothing)
    bag.merge(filled(VALUES, SOME))
    assert bag.compute()["mean"] == 3.5
    assert bag.compute()["max"] == 4.0
    assert bag.compute()["min"] == 3.0


def test_a_tensor_without_elements_leaves_the_metric_out():
    bag = MetricBag()
    bag.mean("mean", torch.zeros(0))
    bag.max("max", torch.zeros(0, 3))
    bag.min("min", torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool))
    assert bag.compute() == {}
    bag.max("max", torch.tensor(2.0))
    assert bag.compute() == {"max": 2.0}


def test_an_empty_bag():
    assert MetricBag().compute() == {}


def test_nothing_of_the_graph_is_kept():
    values = VALUES.clone().requires_grad_()
    bag = filled(values * 2, SOME)
    stores = (bag._sums, bag._counts, bag._maxima, bag._minima)
    assert not [name for store in stores for name, value in store.items() if value.requires_grad]


def test_sums_are_float64():
    bag = MetricBag()
    for _ in range(10):
        bag.mean("mean", torch.tensor([1e8, 1.0], dtype=torch.float32))
    assert bag.compute()["mean"] == (1e8 + 1) / 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_shown_and_not_hidden(value):
    found = filled(torch.tensor([1.0, value])).compute()
    assert not math.isfinite(found["mean"])
    assert not math.isfinite(found["max"])


@pytest.mark.parametrize("keep", [True, False])
def test_a_renamed_metric_keeps_its_value_and_what_follows_from_it(keep):
    bag = filled(VALUES)
    bag.rename(
        {
            "mean": "average",
            "max": "top",
            "min": "bottom",
            "sum": "total",
            "std": "spread",
            "absent": "x",
        },
        keep=keep,
    )
    found, old = bag.compute(), filled(VALUES).compute()
    new = {"average": "mean", "top": "max", "bottom": "min", "total": "sum", "spread": "std"}
    assert found == {name: old[was] for name, was in new.items()} | (old if keep else {})
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
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [values[:2], values[2:]]

    def work(rank, reduce):
        return filled(parts[rank]).compute(reduce["sum"], reduce["max"])

    whole = filled(values).compute()
    for found in on_shards(2, work):
        assert found == pytest.approx(whole, abs=1e-12)
        assert found["max"] == values.max().item()
        assert found["min"] == values.min().item()


def test_a_process_whose_mask_is_empty_does_not_disturb_the_others():
    masks = [torch.zeros(4, dtype=torch.bool), SOME]

    def work(rank, reduce):
        return filled(VALUES, masks[rank]).compute(reduce["sum"], reduce["max"])

    for found in on_shards(2, work):
        assert (found["mean"], found["max"], found["min"]) == (3.5, 4.0, 3.0)


def test_one_collective_for_sums_and_one_for_extrema():
    calls = []

    def reduce(value):
        calls.append(value.shape)
        return value

    filled(VALUES).compute(reduce, reduce)
    assert len(calls) == 2


def test_masked_reductions():
    values = torch.tensor([[1.0, math.nan], [math.inf, 4.0], [math.nan, math.nan]])
    mask = torch.tensor([[True, False], [False, True], [False, False]])
    assert masked_sum(values, mask).item() == 5
    assert masked_sum(values, mask, 1).tolist() == [1, 4, 0]
    assert masked_mean(values, mask).item() == 2.5
    assert masked_mean(values, mask, 1).tolist() == [1, 4, 0]
    doubled = masked_mean(values, mask, all_reduce=lambda total: total + torch.tensor([5.0, 1.0]))
    assert doubled.item() == pytest.approx(10 / 3)


@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-4, 1.0])
def test_kl_estimators(scale):
    x = scale * torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(k1(x), -x)
    torch.testing.assert_close(k2(x), x * x / 2, rtol=1e-15, atol=0)
    series = sum(x**n / float(math.factorial(n)) for n in range(2, 30))
    torch.testing.assert_close(k3(x), series, rtol=1e-12, atol=1e-15 * scale)
    assert (k3(x) >= 0).all()
    assert (k3(x.float()) >= 0).all()


# --- The diagnostics of the correction

ALWAYS = {
    *("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
    *("kl", "k3_kl", "chi2_token", "chi2_seq", "logprob_abs_diff_mean", "logprob_abs_diff_max"),
    *(
        "rollout_is_mean",
        "rollout_is_raw_mean",
        "rollout_is_std",
        "rollout_is_max",
        "rollout_is_min",
    ),
    *(
        "rollout_is_eff_sample_size",
        "rollout_is_ratio_fraction_high",
        "rollout_is_ratio_fraction_low",
    ),
    *("rollout_is_seq_mean", "rollout_is_seq_std", "rollout_is_seq_max", "rollout_is_seq_min"),
    *(
        "rollout_is_seq_max_deviation",
        "rollout_is_seq_fraction_high",
        "rollout_is_seq_fraction_low",
    ),
    *("rollout_is_masked_fraction", "rollout_is_seq_masked_fraction"),
    *("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction"),
    *(
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
        "rollout_rs_nonfinite_fraction",
    ),
    "rejected_ratio",
}
OF_A_CRITERION = (
    *(
        "mean",
        "std",
        "max",
        "min",
        "fraction_high",
        "fraction_low",
        "masked_fraction",
        "seq_masked_fraction",
    ),
    *(
        "seq_mean",
        "seq_std",
        "seq_max",
        "seq_min",
        "seq_max_deviation",
        "seq_fraction_high",
        "seq_fraction_low",
    ),
)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_the_names_of_the_metrics(level):
    training, rollout = log_probs()
    rule = Rule(
        level,
        bands=(("token_k1", 0.5, 2.0), ("seq_max_k3", 0.0, 0.2)),
        veto=1e-4,
        normalise=level is not None,
    )
    names = {
        f"rollout_rs_{band}_{suffix}" for band, _, _ in rule.bands for suffix in OF_A_CRITERION
    }
    found = run(training, rollout, mask_of("right"), rule).metrics.compute()
    assert set(found) == ALWAYS | names | ({"rollout_is_batch_norm_factor"} if level else set())
    plain = run(training, rollout, mask_of("right"), Rule(level)).metrics.compute()
    assert set(plain) == ALWAYS


@pytest.mark.parametrize("mode", MODES)
def test_modes_other_than_truncation_count_what_is_out_of_bounds(mode):
    training, rollout = log_probs()
    lower = 0.0 if mode == "truncate" else 0.5
    found = run(
        training, rollout, mask_of("right"), Rule("token", mode, lower, 2.0)
    ).metrics.compute()
    assert set(found) == ALWAYS | (set() if mode == "truncate" else {"rollout_is_oob_ratio"})


def test_by_hand():
    """Two sequences, differences (log 2, 0) and (-log 4): ratios 2, 1 and 1/4."""
    training = torch.tensor([[math.log(2) - 1, -1.0], [-math.log(4) - 2, 7.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -1.0], [-2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    rule = Rule("sequence", upper=1.5, bands=(("seq_mean_k1", 0.5, 1.6),))
    values = run(training, rollout, mask, rule).metrics.compute()
    log2 = math.log(2)
    by_hand = {
        "log_ppl_diff": (-log2 / 2 + 2 * log2) / 2,
        "log_ppl_abs_diff": (log2 / 2 + 2 * log2) / 2,
        "log_ppl_diff_max": 2 * log2,
        "log_ppl_diff_min": -log2 / 2,
        "ppl_ratio": (2**-0.5 + 4) / 2,
        "training_ppl": (math.e / 2**0.5 + 4 * math.e**2) / 2,
        "rollout_ppl": (math.e + math.e**2) / 2,
        "kl": (-log2 + 0 + 2 * log2) / 3,
        "k3_kl": (1 - log2 + 0 + 1 / 4 - 1 + 2 * log2) / 3,
        "chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
        "chi2_seq": (4 + 1 / 16) / 2 - 1,
        "rollout_is_mean": (1.5 + 1.5 + 0.25) / 3,
        "rollout_is_raw_mean": (2 + 2 + 0.25) / 3,
        "rollout_is_max": 2,
        "rollout_is_min": 1 / 4,
        "rollout_is_eff_sample_size": (3.25 / 3) ** 2 / ((2.25 + 2.25 + 0.0625) / 3),
        "rollout_is_ratio_fraction_high": 1 / 2,
        "rollout_is_ratio_fraction_low": 1 / 2,
        "rollout_is_seq_mean": 1.75 / 2,
        "rollout_is_seq_std": 1.25 / math.sqrt(2),
        "rollout_rs_seq_mean_k1_mean": (-log2 / 2 - log2 / 2 + 2 * log2) / 3,
        "rollout_rs_seq_mean_k1_max": 2 * log2,
        "rollout_rs_seq_mean_k1_min": -log2 / 2,
        "rollout_rs_seq_mean_k1_fraction_high": 1 / 2,
        "rollout_rs_seq_mean_k1_fraction_low": 0,
        "rollout_rs_seq_mean_k1_masked_fraction": 1 / 3,
        "rollout_rs_seq_mean_k1_seq_masked_fraction": 1 / 2,
        "rollout_rs_seq_mean_k1_seq_max_deviation": 2 * log2,
        "rollout_rs_seq_mean_k1_seq_std": 2.5 * log2 / math.sqrt(2),
        "rollout_rs_masked_fraction": 1 / 3,
        "rejected_ratio": 1 / 2,
    }
    assert {name: values[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-13)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e-4, 1e-2, 2.0])
def test_metrics_hold_at_the_scale_of_diffusion_log_ratios(level, scale):
    """fp32 makes k3 negative and variances zero at 1e-4; the rollout log-probs are of order 1."""
    source = torch.Generator().manual_seed(1)
    difference = scale * torch.randn(40, 3, generator=source, dtype=torch.float64)
    mask, zero = torch.ones(40, 3, dtype=torch.bool), torch.zeros_like(difference)
    rule = Rule(
        level, bands=(("token_k3", 0.0, scale), ("seq_mean_k1", math.exp(-scale), math.exp(scale)))
    )
    found = run(difference, zero, mask, rule).metrics.compute()
    expect = expected(difference, zero, mask, rule).metrics
    assert found["k3_kl"] > 0
    assert found == pytest.approx(expect, rel=1e-6, abs=scale**2 * 1e-6)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(
        expect["rollout_is_eff_sample_size"], rel=1e-12
    )


def test_k3_is_never_negative_for_fp32_inputs():
    source = torch.Generator().manual_seed(2)
    for scale in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4):
        rollout = -1 + 0.1 * torch.randn(10, 2, generator=source)
        training = rollout + scale * torch.randn(10, 2, generator=source)
        for row in range(10):
            pair = training[row : row + 1], rollout[row : row + 1], torch.ones(1, 2)
            assert compute_offpolicy_metrics(*pair)["k3_kl"] >= 0


@pytest.mark.parametrize(
    ("level", "highest", "lowest"),
    [("token", 2.0, 0.2), ("sequence", 9.0, 0.04), ("geometric", 3.0, 0.2)],
)
def test_extremes_are_those_after_the_bounds_for_tokens_and_before_them_for_sequences(
    level, highest, lowest
):
    ratio = torch.tensor([[3.0, 3.0], [0.2, 0.2], [1.1, 1.1], [2.5, 2.5]], dtype=torch.float64)
    training, mask = ratio.log(), torch.ones(4, 2, dtype=torch.bool)
    values = run(training, torch.zeros_like(training), mask, Rule(level)).metrics.compute()
    assert values["rollout_is_ratio_fraction_high"] == values["rollout_is_seq_fraction_high"] == 0.5
    assert values["rollout_is_ratio_fraction_low"] == values["rollout_is_seq_fraction_low"] == 0.25
    assert values["rollout_is_max"] == pytest.approx(highest)
    assert values["rollout_is_min"] == pytest.approx(lowest)
    assert values["rollout_is_seq_max"] == 2.0


def test_the_largest_sequence_ratio_shown_is_e_to_the_20_and_the_smallest_has_no_bound():
    training = torch.tensor([[30.0, 30.0], [-30.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    values = run(training, torch.zeros_like(training), mask, Rule("sequence")).metrics.compute()
    assert values["rollout_is_max"] == pytest.approx(math.exp(20))
    assert values["rollout_is_min"] == pytest.approx(math.exp(-30), rel=1e-12)


def test_without_valid_steps_there_are_no_metrics_of_values():
    found = compute_rollout_correction_and_rejection_mask(
        torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)
    )
    assert found.metrics == {}


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("criterion", ["token_k1", "seq_mean_k3", "seq_max_k2"])
def test_an_empty_batch(shape, level, criterion):
    empty = torch.zeros(shape)
    found = compute_rollout_correction_and_rejection_mask(
        empty, empty, empty, rollout_is=level, rollout_rs=criterion, rollout_rs_threshold=2.0
    )
    assert found.weights.shape == found.mask.shape == shape
    assert found.metrics == {}


# --- Sharding

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
    bag, parts = MetricBag(), []
    for start, stop in zip([0, *cuts], [*cuts, 6], strict=True):
        parts.append(run(training[start:stop], rollout[start:stop], mask[start:stop], rule))
        bag.merge(parts[-1].metrics)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    if whole.weights is not None:
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert bag.compute() == pytest.approx(whole.metrics.compute(), rel=0, abs=1e-12)


@pytest.mark.parametrize("rule", [*SHARDED, *NORMALISED])
def test_a_process_without_rows_holds_the_names_of_the_others(rule):
    """The collective of the metrics needs them."""
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
    """The second row is empty: a process of three has no step at all."""
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
    """Another process holds 5 tokens whose weights add up to 9.5: mean (1 + 2 + 9.5) / 7."""
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
    bag, rule = MetricBag(), Rule(bands=(("token_k1", 0.5, 2.0),))
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


def test_metrics_under_other_names() -> None:
    bag = MetricBag()
    bag.mean("a", torch.tensor([1.0, 3.0]))
    bag.max("b", torch.tensor([5.0]))
    assert bag.pick({"a": "x", "c": "y"}).compute() == {"x": 2.0}
    assert bag.compute() == {"a": 2.0, "b": 5.0}


def test_what_is_replaced_does_not_add_up() -> None:
    """Whatever the kind of the metric was."""
    bag, other = MetricBag(), MetricBag()
    bag.mean("p/a", torch.tensor([1.0, 3.0]))
    bag.max("p/b", torch.tensor([5.0]))
    other.max("a", torch.tensor([7.0]))
    bag.replace(other, "p")
    assert bag.compute() == {"p/a": 7.0, "p/b": 5.0}

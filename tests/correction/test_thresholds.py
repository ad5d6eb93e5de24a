"""The grammar of criteria and thresholds."""

import math

import pytest
from omegaconf import OmegaConf
from support.oracles import CRITERIA as DOCUMENTED

from flowgrpo_rc.correction.thresholds import parse_bands, parse_weight_bounds

RS = "rollout_rs"
THRESHOLD = "rollout_rs_threshold"
LOWER = "rollout_rs_threshold_lower"
K1 = [name for name in DOCUMENTED if name.endswith("k1")]
UPPER = [*(name for name in DOCUMENTED if name not in K1), "step_kl"]


def bounds(criteria, thresholds, lower=None, **options):
    """Returns (criterion, lower, upper) in the space of the statistic."""
    return [
        (band.name, band.lower, band.upper)
        for band in parse_bands(criteria, thresholds, lower, **options)
    ]


def on_ratio(name, lower, upper):
    """lower <= ratio <= upper is -log(upper) <= k1 <= -log(lower)."""
    return (
        name,
        pytest.approx(-math.log(upper), abs=1e-15),
        pytest.approx(-math.log(lower), abs=1e-15),
    )


@pytest.mark.parametrize("criterion", K1)
@pytest.mark.parametrize(
    ("spec", "lower", "upper"),
    [
        ("0.5_2.0", 0.5, 2.0),
        (" 0.5_2 ", 0.5, 2.0),
        ("0.9999_1.0001", 0.9999, 1.0001),
        ("1e-3_1e3", 1e-3, 1e3),
        ("2.0", 0.5, 2.0),
        (2.0, 0.5, 2.0),
        (4, 0.25, 4.0),
        ("1.001", 1 / 1.001, 1.001),
    ],
)
def test_a_band_bounds_the_ratio(criterion, spec, lower, upper):
    assert bounds(criterion, spec) == [on_ratio(criterion, lower, upper)]


@pytest.mark.parametrize("criterion", UPPER)
@pytest.mark.parametrize("spec", [0.01, "0.01", " 1e-2 "])
def test_other_criteria_take_one_upper_bound(criterion, spec):
    assert bounds(criterion, spec) == [(criterion, -math.inf, 0.01)]


@pytest.mark.parametrize(("spec", "lower"), [("0_2.0", None), (2.0, 0), (2.0, 0.0), ("2.0", "0")])
def test_a_lower_bound_of_zero_leaves_the_lower_side_open(spec, lower):
    """No ratio is too small, so no k1 is too large."""
    assert bounds("token_k1", spec, lower) == [("token_k1", -math.log(2), math.inf)]


def test_auto_bands_count_deviations():
    for name, lower in (("token_k1", -2.5), ("geometric", -2.5), ("seq_max_k2", -math.inf)):
        (band,) = parse_bands(name, " auto:2.5 ")
        assert (band.lower, band.upper, band.auto) == (lower, 2.5, True)
    fixed, auto = parse_bands("token_k1,step_kl", "0.5_2.0,auto:4")
    assert (fixed.auto, auto.auto) == (False, True)


@pytest.mark.parametrize(
    ("criteria", "thresholds"),
    [
        ("seq_mean_k1,seq_max_k2", "0.5_2.0,0.01"),
        (" seq_mean_k1 , seq_max_k2 ", " 0.5_2.0 , 0.01 "),
        (["seq_mean_k1", "seq_max_k2"], ["0.5_2.0", 0.01]),
        (("seq_mean_k1", "seq_max_k2"), ("0.5_2.0", "0.01")),
        (OmegaConf.create(["seq_mean_k1", "seq_max_k2"]), OmegaConf.create(["0.5_2.0", 0.01])),
    ],
)
def test_criteria_and_thresholds_are_lists_or_have_commas(criteria, thresholds):
    expect = [("seq_mean_k1", -math.log(2), math.log(2)), ("seq_max_k2", -math.inf, 0.01)]
    assert bounds(criteria, thresholds) == expect
    for nothing in (None, "", " ", []):
        assert parse_bands(nothing, None) == ()


@pytest.mark.parametrize("thresholds", ["0.5_2.0", ["0.5_2.0"], 2.0, [2]])
def test_one_threshold_for_all_criteria(thresholds):
    actual = bounds("token_k1,seq_sum_k1,seq_mean_k1", thresholds)
    assert [entry[1:] for entry in actual] == [(-math.log(2), math.log(2))] * 3


@pytest.mark.parametrize(
    ("upper", "lower", "expect"),
    [
        (2.0, 0.4, [(0.4, 2)] * 2),
        ("1.001", "0.998", [(0.998, 1.001)] * 2),
        ([2.0, 3.0], 0.5, [(0.5, 2), (0.5, 3)]),
        (2.0, [0.5, 0.25], [(0.5, 2), (0.25, 2)]),
        ("2.0,3.0", "0.5,0.25", [(0.5, 2), (0.25, 3)]),
        ([2.0, "0.1_3"], [0.4, None], [(0.4, 2), (0.1, 3)]),
        ([2.0, 4], [None, 0.1], [(0.5, 2), (0.1, 4)]),
    ],
)
def test_a_lower_bound_may_be_given_separately(upper, lower, expect):
    names = ("token_k1", "seq_mean_k1")
    assert bounds(names, upper, lower) == [
        on_ratio(name, *pair) for name, pair in zip(names, expect, strict=True)
    ]


@pytest.mark.parametrize(
    ("older", "name"),
    [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")],
)
def test_older_names_without_a_threshold_take_that_of_the_weights(older, name):
    assert bounds(older, 3.0) == bounds(name, 3.0) == [on_ratio(name, 1 / 3, 3)]
    assert bounds(older, None, fallback=2.0) == [on_ratio(name, 0.5, 2)]
    assert bounds(older, None, 0.25, fallback=2.0) == [on_ratio(name, 0.25, 2)]
    assert bounds(older, 3.0, fallback=2.0) == [on_ratio(name, 1 / 3, 3)]
    assert bounds(older, None, fallback="0.4_3.0") == [on_ratio(name, 0.4, 3)]
    with pytest.raises(ValueError, match=THRESHOLD):
        bounds(name, None, fallback=2.0)
    with pytest.raises(ValueError, match=THRESHOLD):
        bounds((older, "seq_max_k2"), None, fallback=2.0)


@pytest.mark.parametrize(
    ("threshold", "mode", "expect"),
    [
        (2.0, None, ("truncate", 0, 2)),
        (1, "truncate", ("truncate", 0, 1)),
        ("0.5_5.0", None, ("icepop", 0.5, 5)),
        ("0_5.0", None, ("icepop", 0, 5)),
        ("0.5_5.0", "clip", ("clip", 0.5, 5)),
        (4.0, "mask", ("mask", 0.25, 4)),
        (4.0, "icepop", ("icepop", 0.25, 4)),
        (" 0.999_1.001 ", None, ("icepop", 0.999, 1.001)),
    ],
)
def test_bounds_of_the_weights(threshold, mode, expect):
    assert parse_weight_bounds(threshold, mode) == expect


@pytest.mark.parametrize(
    ("threshold", "mode", "words"),
    [
        (0.52, None, ["1 or more", "quote", "0.5_2.0", "0.52"]),
        (-2, "clip", ["1 or more"]),
        (math.inf, None, ["1 or more"]),
        ("nan", None, ["number"]),
        ("abc", None, ["abc", "number"]),
        (None, None, ["number"]),
        (True, None, ["number"]),
        ("0.5_1_2", None, ["lower_upper"]),
        ("2.0_0.5", None, ["lower < upper"]),
        ("-1_2", None, ["0 <= lower"]),
        ("0.5_inf", None, ["lower < upper"]),
        ("0.5_2.0", "truncate", ["rollout_is_mode", "truncate", "one number"]),
        (2.0, "tis", ["rollout_is_mode", "tis", "truncate", "clip", "mask", "icepop", "null"]),
    ],
)
def test_wrong_bounds_of_the_weights(threshold, mode, words):
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.rollout_is_") as error:
        parse_weight_bounds(threshold, mode)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("criteria", "upper", "lower", "words"),
    [
        ("token_k1", "2.0_0.5", None, ["lower < upper", THRESHOLD]),
        ("token_k1", "-0.5_2.0", None, ["0 <= lower"]),
        ("token_k1", "0.5_inf", None, ["lower < upper"]),
        ("token_k1", "nan_2", None, ["number"]),
        ("token_k1", 0.52, None, ["quote", "0.5_2.0", "0.52"]),
        ("token_k1", "0.5", None, ["quote", "exceed 1"]),
        ("token_k1", "nan", None, ["number"]),
        ("token_k1", math.inf, None, ["exceed 1"]),
        ("token_k1", "0.5_1_2", None, ["lower_upper"]),
        ("token_k1", "abc", None, ["abc", "number"]),
        ("token_k1", "0.5_", None, ["number"]),
        ("token_k1", True, None, ["number"]),
        ("token_k1", None, None, [RS, THRESHOLD, "0.5_2.0"]),
        ("token_k1", [], None, [RS, THRESHOLD]),
        ("token_k1", "0.5_2.0,0.5_2.0", None, ["2 entries", "1 criteria"]),
        *(("token_k1", f"auto{k}", None, ["auto:4"]) for k in ("", ":", ":0", ":-1", ":x")),
        *(("token_k1", f"auto{k}", None, ["auto:4"]) for k in (":nan", "4", ":1_2")),
        *((name, "0.5_2.0", None, [name, "one upper bound"]) for name in UPPER),
        *((name, 0, None, [name, "above 0"]) for name in UPPER),
        *((name, "nan", None, ["number"]) for name in UPPER),
        *((name, math.inf, None, [name, "above 0"]) for name in UPPER),
        ("token_k1,seq_max_k2", "0.5_2.0", None, ["seq_max_k2"]),
        ("token_k1,token_k1", "0.5_2.0", None, ["twice"]),
        (None, "0.5_2.0", None, [RS, THRESHOLD, "no effect"]),
        ("token_k1", "0.5_2.0", 0.4, [THRESHOLD, LOWER, "both"]),
        ("token_k1", 2.0, 3.0, [THRESHOLD, LOWER, "lower < upper"]),
        ("token_k1", 2.0, -0.1, [THRESHOLD, LOWER, "0 <= lower"]),
        ("token_k1", 2.0, "0.4_0.6", [LOWER, "one number"]),
        ("token_k1", 2.0, "abc", [LOWER, "abc"]),
        ("token_k1", "auto:4", 0.5, [LOWER, "no effect"]),
        ("token_k2", 2.0, 0.5, [LOWER, "no effect", "token_k2"]),
        ("token_k1,token_k3", "2.0,0.1", 0.5, [LOWER, "no effect", "token_k3"]),
        (None, None, 0.5, [LOWER, RS, "no effect"]),
    ],
)
def test_wrong_specs_say_what_was_given_and_what_to_do(criteria, upper, lower, words):
    with pytest.raises(ValueError, match="rollout_rs") as error:
        parse_bands(criteria, upper, lower)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("seq_mean_k4", "seq_mean_k"),
        ("sequence_mean_k1", "seq_mean_k1"),
        ("tokenk1", "token_k1"),
        ("seq_max_k1", "seq_max"),
    ],
)
def test_an_unknown_criterion_names_the_nearest_and_all(given, nearest):
    with pytest.raises(ValueError, match="did you mean '" + nearest) as error:
        parse_bands(given, "0.5_2.0")
    assert all(name in str(error.value) for name in DOCUMENTED)
    assert given in str(error.value)

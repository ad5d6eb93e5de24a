"""The grammar of criteria and thresholds, and settings that contradict each other."""

from __future__ import annotations

import math

import pytest
from oracles import CRITERIA as DOCUMENTED

from flowgrpo_rc.correction.bands import CRITERIA, parse_bands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig

RS, THRESHOLD = "rollout_rs", "rollout_rs_threshold"


def bounds(criteria, thresholds):
    return [(band.name, band.lower, band.upper) for band in parse_bands(criteria, thresholds)]


def test_the_criteria_are_the_documented_ones():
    assert set(CRITERIA) == set(DOCUMENTED)
    assert len(CRITERIA) == 11


@pytest.mark.parametrize("criterion", [name for name in DOCUMENTED if name.endswith("k1")])
@pytest.mark.parametrize(
    ("spec", "lower", "upper"),
    [
        ("0.5_2.0", 0.5, 2.0),
        (" 0.5_2 ", 0.5, 2.0),
        ("0.999_1.001", 0.999, 1.001),
        ("0.9999_1.0001", 0.9999, 1.0001),
        ("1e-3_1e3", 1e-3, 1e3),
        ("2.0", 0.5, 2.0),
        (2.0, 0.5, 2.0),
        (4, 0.25, 4.0),
        ("1.001", 1 / 1.001, 1.001),
    ],
)
def test_a_band_is_one_on_the_ratio(criterion, spec, lower, upper):
    ((name, low, high),) = bounds(criterion, spec)
    assert name == criterion
    assert low == pytest.approx(math.log(lower), abs=1e-15)
    assert high == pytest.approx(math.log(upper), abs=1e-15)


def test_a_lower_bound_of_zero_leaves_the_lower_side_open():
    assert bounds("token_k1", "0_2.0") == [("token_k1", -math.inf, math.log(2))]


@pytest.mark.parametrize("criterion", [name for name in DOCUMENTED if not name.endswith("k1")])
@pytest.mark.parametrize("spec", [0.01, "0.01", " 1e-2 "])
def test_k2_and_k3_take_one_upper_bound(criterion, spec):
    assert bounds(criterion, spec) == [(criterion, -math.inf, 0.01)]


@pytest.mark.parametrize(
    ("criteria", "thresholds"),
    [
        ("seq_mean_k1,seq_max_k2", "0.5_2.0,0.01"),
        (" seq_mean_k1 , seq_max_k2 ", " 0.5_2.0 , 0.01 "),
        (["seq_mean_k1", "seq_max_k2"], ["0.5_2.0", 0.01]),
        (("seq_mean_k1", "seq_max_k2"), ("0.5_2.0", "0.01")),
    ],
)
def test_one_threshold_for_each_criterion(criteria, thresholds):
    expect = [("seq_mean_k1", math.log(0.5), math.log(2)), ("seq_max_k2", -math.inf, 0.01)]
    assert bounds(criteria, thresholds) == expect


@pytest.mark.parametrize("thresholds", ["0.5_2.0", ["0.5_2.0"], 2.0, [2]])
def test_one_threshold_for_all_criteria(thresholds):
    found = bounds("token_k1,seq_sum_k1,seq_mean_k1", thresholds)
    assert [entry[1:] for entry in found] == [(math.log(0.5), math.log(2))] * 3


def test_lists_of_the_configuration_library():
    omegaconf = pytest.importorskip("omegaconf")
    listed = omegaconf.OmegaConf.create({"rs": ["token_k1", "token_k3"], "threshold": ["0.5_2.0", 0.1]})
    assert bounds(listed.rs, listed.threshold) == bounds("token_k1,token_k3", "0.5_2.0,0.1")


@pytest.mark.parametrize("nothing", [None, "", " ", []])
def test_no_criterion_no_bands(nothing):
    assert parse_bands(nothing, None) == ()


@pytest.mark.parametrize(
    ("criteria", "thresholds", "words"),
    [
        ("token_k1", "2.0_0.5", ["lower < upper", THRESHOLD]),
        ("token_k1", "2.0_2.0", ["lower < upper"]),
        ("token_k1", "-0.5_2.0", ["0 <= lower"]),
        ("token_k1", "0.5_inf", ["lower < upper"]),
        ("token_k1", "nan_2", ["lower < upper"]),
        ("token_k1", 0.52, ["quote", "0.5_2.0", "0.52"]),
        ("token_k1", "0.5", ["quote", "exceed 1"]),
        ("token_k1", 1, ["exceed 1"]),
        ("token_k1", "nan", ["exceed 1"]),
        ("token_k1", math.inf, ["exceed 1"]),
        ("token_k1", "0.5_1_2", ["lower_upper"]),
        ("token_k1", "abc", ["abc", "number"]),
        ("token_k1", "0.5_", ["number"]),
        ("token_k1", "0.5-2.0", ["number"]),
        ("token_k1", True, ["number"]),
        ("token_k1", None, [RS, THRESHOLD, "0.5_2.0"]),
        ("token_k1", [], [RS, THRESHOLD]),
        ("token_k1", "0.5_2.0,0.5_2.0", ["2 entries", "1 criteria"]),
        ("token_k1,token_k2,token_k3", "0.5_2.0,0.1", ["2 entries", "3 criteria"]),
        ("token_k2", "0.5_2.0", ["token_k2", "one upper bound"]),
        ("token_k2", 0, ["above 0"]),
        ("token_k3", -1, ["above 0"]),
        ("token_k3", "nan", ["above 0"]),
        ("token_k3", math.inf, ["above 0"]),
        ("token_k1,seq_max_k2", "0.5_2.0", ["seq_max_k2"]),
        ("token_k1,token_k1", "0.5_2.0", ["twice"]),
        (None, "0.5_2.0", [RS, THRESHOLD, "no effect"]),
        ("", 2.0, [RS, THRESHOLD]),
    ],
)
def test_wrong_specs_say_what_was_given_and_what_to_do(criteria, thresholds, words):
    with pytest.raises(ValueError, match="rollout_rs") as error:
        parse_bands(criteria, thresholds)
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
    with pytest.raises(ValueError, match="did you mean " + nearest) as error:
        parse_bands(given, "0.5_2.0")
    assert all(name in str(error.value) for name in DOCUMENTED)
    assert given in str(error.value)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"loss_type": "ppo"}, ["loss_type", "ppo_clip", "reinforce"]),
        ({"rollout_is": "tokens"}, ["rollout_is", "token", "sequence"]),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, ["rollout_is_threshold"]),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, ["rollout_is_threshold"]),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, ["rollout_is_threshold"]),
        ({"loss_type": "reinforce"}, ["loss_type", "bypass_mode"]),
        ({"rollout_is_batch_normalize": True}, ["rollout_is_batch_normalize", "rollout_is "]),
        (
            {"rollout_is_batch_normalize": True, "bypass_mode": True, "rollout_is": "token"},
            ["rollout_is_batch_normalize", "bypass_mode"],
        ),
        ({"rollout_rs_threshold": "0.5_2.0"}, ["rollout_rs_threshold", "algorithm.rollout_correction.rollout_rs:"]),
        ({"rollout_rs": "token_k1"}, ["rollout_rs", "rollout_rs_threshold"]),
    ],
)
def test_contradictions_name_both_keys(settings, keys):
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.") as error:
        RolloutCorrectionConfig(**settings).validate()
    assert [key for key in keys if key not in str(error.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bypass_mode": True, "rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
        {"bypass_mode": True, "loss_type": "reinforce"},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_rs": ["token_k1", "seq_max_k3"], "rollout_rs_threshold": ["0.5_2.0", 0.1]},
    ],
)
def test_settings_of_the_documents_are_valid(settings):
    RolloutCorrectionConfig(**settings).validate()

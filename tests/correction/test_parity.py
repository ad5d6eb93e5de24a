"""Agreement with the published wheels verl 0.9.1 and 0.6.1.

`examples/benchmarks/parity_vectors.py` has written their results into `parity/`. Where this project
differs on purpose, a test at the end shows it: the band of k1 criteria, sequences without a valid
step, float32 artefacts, tokens beyond the safety bound, and a batch whose weights are all 0.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from parity_vectors import load_vectors

from flowgrpo_rc import compute_rollout_correction_and_rejection_mask

CASES = {version: load_vectors(version) for version in ("0.9.1", "0.6.1")}
EXCEPTIONS = load_vectors("0.9.1", "exceptions")
DIVERGENCES = (
    *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
    *("chi2_token", "chi2_seq"),
)
VETOES = ("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction")
# What they average over every row, those without a valid token included.
OVER_ROWS = (*DIVERGENCES, "seq", "ratio_fraction", "veto_fraction", "max", "min")


def ours(case: dict[str, Any], **changes: Any) -> Any:
    """Computes our result for a case's inputs, in float64.

    `changes` replace settings; a setting without effect would be an error here.
    """
    settings = case["settings"] | changes
    for switch in ("rollout_is", "rollout_rs"):
        if settings.get(switch) is None:
            settings = {
                name: value for name, value in settings.items() if not name.startswith(f"{switch}_")
            }
    old = case["old_log_prob"].double()
    rollout = case["rollout_log_prob"].double()
    return compute_rollout_correction_and_rejection_mask(
        old, rollout, case["response_mask"], **settings
    )


def bounded(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the case with every log-ratio bounded to +-20, as verl 0.9.1 does for its
    rejection.
    """
    rollout = case["rollout_log_prob"].double()
    return case | {
        "old_log_prob": rollout + (case["old_log_prob"].double() - rollout).clamp(-20, 20)
    }


def inverted(spec: Any) -> Any:
    """Returns the reciprocal band of each k1 entry, and k2 and k3 entries as they are."""
    entries = [entry.split("_") for entry in str(spec).split(",")]
    return ",".join(
        f"{1 / float(e[1])!r}_{1 / float(e[0])!r}" if len(e) == 2 else e[0] for e in entries
    )


def with_their_band(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings to change, so that an asymmetric band means what it means in verl."""
    if not case["flags"].get("asymmetric", False):
        return {}
    return {"rollout_rs_threshold": inverted(case["settings"]["rollout_rs_threshold"])}


@cache
def results(version: str) -> list[Any]:
    """Computes our result for each case of a wheel, with its band."""
    return [ours(case, **with_their_band(case)) for case in CASES[version]]


def compare(actual: Any, case: dict[str, Any], names: Any, *, rel: float = 1e-4) -> None:
    """Compares metrics with those of verl on float64 inputs.

    Differences of squares leave about 1e-6.
    """
    for name in names:
        mine = actual.metrics[f"rollout_corr/{name}"]
        theirs = case["metrics_float64"][name]
        assert mine == pytest.approx(theirs, rel=rel, abs=2e-6), name


@pytest.mark.parametrize("version", CASES)
def test_weights_and_masks_of_three_hundred_cases(version: str) -> None:
    assert len(CASES[version]) == 300
    for number, (case, actual) in enumerate(zip(CASES[version], results(version), strict=True)):
        judged = (
            ours(bounded(case), **with_their_band(case))
            if version == "0.9.1" and case["flags"]["beyond_bound"]
            else actual
        )
        assert torch.equal(judged.mask, case["modified_mask"].to(judged.mask.dtype)), number
        if case["weights"] is None:
            assert actual.weights is None
            continue
        expect = case["weights"].double()
        if (
            case["settings"]["rollout_is_batch_normalize"]
            and case["flags"]["empty_rows"]
            and version == "0.6.1"
        ):
            # verl's mean counts rows without tokens as 0.
            ratio = actual.weights[expect > 0] / expect[expect > 0]
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=2e-6, atol=0)
        else:
            # A float32 sum of log-ratios of 20 and more is itself uncertain by 1e-6.
            tolerance = 2e-6 if case["flags"]["beyond_bound"] else 1e-6
            torch.testing.assert_close(actual.weights, expect, rtol=tolerance, atol=1e-6)


def test_every_metric_of_the_newer_wheel() -> None:
    compared = 0
    for case, actual in zip(CASES["0.9.1"], results("0.9.1"), strict=True):
        names = set(case["metrics_float64"])
        if case["metrics"].get("rollout_is_mean", 1) < 1e-3:
            # 1e-8 in verl's denominator makes it larger than 1 there.
            names -= {"rollout_is_eff_sample_size"}
        if case["flags"]["empty_rows"]:
            names = {name for name in names if not any(part in name for part in OVER_ROWS)}
        if case["flags"]["beyond_bound"]:
            judged = {name for name in names if name.startswith("rollout_rs")}
            compare(ours(bounded(case), **with_their_band(case)), case, judged)
            names -= judged
        compare(actual, case, names)
        compared += len(names)
    assert compared > 9000


def test_divergence_and_veto_metrics_of_the_older_wheel() -> None:
    vetoed = 0
    for case, actual in zip(CASES["0.6.1"], results("0.6.1"), strict=True):
        names = (*DIVERGENCES, *VETOES)
        if case["flags"]["empty_rows"]:
            names = ("kl", "k3_kl", "chi2_token", "rollout_is_catastrophic_token_fraction")
        compare(actual, case, names)
        vetoed += case["metrics"]["rollout_is_veto_fraction"] > 0
    assert vetoed > 20


def test_rows_without_tokens_change_nothing_here() -> None:
    """verl averages such rows as ratio 1, perplexity 1 and weight 0."""
    cases = [case for case in CASES["0.9.1"] if case["flags"]["empty_rows"]]
    different = 0
    for case in cases:
        present = case["response_mask"].bool().any(1)
        names = ("old_log_prob", "rollout_log_prob", "response_mask")
        without = case | {name: case[name][present] for name in names}
        whole = ours(case)
        assert whole.metrics == pytest.approx(ours(without).metrics, rel=1e-12, abs=1e-15)
        actual = whole.metrics["rollout_corr/training_ppl"]
        different += actual != pytest.approx(case["metrics_float64"]["training_ppl"], rel=1e-3)
    assert different > len(cases) / 2


# --- The exceptions, one by one


def exceptions(name: str) -> list[dict[str, Any]]:
    actual = [case for case in EXCEPTIONS if case["name"] == name]
    assert actual
    return actual


@pytest.mark.parametrize(
    "case", exceptions("asymmetric_band"), ids=lambda case: case["settings"]["rollout_rs"]
)
def test_a_band_holds_training_over_rollout_and_verl_s_its_inverse(
    case: dict[str, Any],
) -> None:
    theirs = case["modified_mask"].long()
    mask = ours(case).mask.bool()
    threshold = case["settings"]["rollout_rs_threshold"]
    assert not torch.equal(mask.long(), theirs)
    assert torch.equal(ours(case, rollout_rs_threshold=inverted(threshold)).mask, theirs)
    lower, upper = (float(part) for part in threshold.split("_"))
    if case["settings"]["rollout_rs"] == "token_k1":
        ratio = (case["old_log_prob"].double() - case["rollout_log_prob"].double()).exp()
        assert torch.equal(mask, case["response_mask"].bool() & (lower <= ratio) & (ratio <= upper))


@pytest.mark.parametrize(
    "case", exceptions("float32_cancellation"), ids=lambda case: str(case["flags"])
)
def test_small_log_ratios_keep_their_digits_and_verl_s_do_not(case: dict[str, Any]) -> None:
    actual = {name: ours(case).metrics[f"rollout_corr/{name}"] for name in case["metrics"]}
    assert actual["k3_kl"] > 0
    wrong = [
        name
        for name, value in case["metrics"].items()
        if value != pytest.approx(actual[name], rel=0.05)
    ]
    assert "k3_kl" in wrong
    assert (
        case["metrics"]["k3_kl"] <= 0
        or case["metrics"]["k3_kl"] > 1.05 * actual["k3_kl"]
        or len(wrong) > 1
    )


@pytest.mark.parametrize(
    "case", exceptions("clamped_tokens"), ids=lambda case: case["settings"]["rollout_rs"]
)
def test_a_sequence_is_judged_by_its_product_and_verl_s_by_bounded_factors(
    case: dict[str, Any],
) -> None:
    """[+40, -20]: the product of the ratios is e^20; bounded to e^20 and e^-20 they cancel."""
    assert not torch.equal(ours(case).mask.long(), case["modified_mask"].long())


def test_a_batch_whose_weights_are_all_zero_is_no_error() -> None:
    (case,) = exceptions("all_zero_weights")
    assert case["raises"].startswith("ZeroDivisionError")
    actual = ours(case)
    assert torch.count_nonzero(actual.weights) == 0
    assert actual.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert all(math.isfinite(value) for value in actual.metrics.values())

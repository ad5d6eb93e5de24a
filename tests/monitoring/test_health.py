"""Each health rule at its threshold, and when the monitor warns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.compositions import resolved

from flowgrpo_rc.assembly.run import make_health
from flowgrpo_rc.config.tree import Config, DataConfig
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.monitoring.health import HealthMonitor, check_rollout_correction_health
from flowgrpo_rc.monitoring.health_rules import Setup
from flowgrpo_rc.rollout.config import RolloutConfig

PREFIXES = ("rollout_corr/", "actor/rollout_corr/")


def settings_of(**changes: Any) -> RolloutCorrectionConfig:
    """Returns settings with weights and a criterion, in bypass mode."""
    settings = {"bypass_mode": True, "rollout_is": "sequence", "rollout_rs": "seq_mean_k1"}
    return RolloutCorrectionConfig(**settings | {"rollout_rs_threshold": "0.5_2.0"} | changes)


def warned(metrics: Mapping[str, float | None], **changes: Any) -> tuple[str, ...]:
    return check_rollout_correction_health(metrics, settings_of(**changes)).warnings


def monitor_of(*, text: bool = False, unquantized: float | None = None) -> HealthMonitor:
    settings = settings_of()
    rules = settings.rules()
    setup = Setup.of(settings, rules, text=text, fresh=True, unquantized=unquantized)
    return HealthMonitor(setup)


# A metric, the last healthy value, one that is not.
THRESHOLDS = [
    ("mismatch_over_expected", 2.0, 2.01),
    ("pre_update_clip_fraction", 0.3, 0.31),
    ("rollout_rs_seq_masked_fraction", 0.05, 0.051),
    ("log_ppl_abs_diff", 1.0, 1.01),
    ("rollout_is_mean", 0.5, 0.49),
    ("rollout_is_mean", 2.0, 2.01),
    ("rollout_is_veto_fraction", 0.1, 0.11),
    ("rollout_is_eff_sample_size", 0.3, 0.29),
    ("rollout_is_std", 1.0, 1.01),
    ("kl", -0.1, -0.11),
    ("kl", 0.1, 0.11),
    ("chi2_token", 1.0, 1.01),
]


def named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}


def test_each_rule_flips_at_its_threshold() -> None:
    for index, (metric, healthy, ill) in enumerate(THRESHOLDS):
        prefix = PREFIXES[index % 2]
        assert warned({prefix + metric: healthy}) == ()
        (warning,) = warned({prefix + metric: ill})
        assert warning.startswith(f"{prefix}{metric} is {ill:.4g}, ")
        assert "{" not in warning
        assert warning.endswith(".")
    assert "mismatch_kl is 0.2" in warned({"rollout_corr/mismatch_kl": 0.2})[0]  # slime's name


def test_rejection_above_ten_percent_also_dilutes() -> None:
    name = "rollout_corr/rollout_rs_seq_masked_fraction"
    assert len(warned({name: 0.10})) == 1
    _, diluted = warned({name: 0.11})
    assert "above 0.1:" in diluted
    assert "dilute" in diluted
    assert "rollout_rs_threshold of seq_mean_k1" in diluted
    assert len(warned({name: 0.5}, normalize="kept")) == 1


@pytest.mark.parametrize("rejected", [0.07, 0.41])
def test_a_band_is_widened_only_if_the_mismatch_is_as_expected(rejected: float) -> None:
    band = "widen algorithm.rollout_correction.rollout_rs_threshold of seq_mean_k1"

    def advice(**more: float) -> str:
        metrics = {"rollout_rs_seq_masked_fraction": rejected} | more
        return " ".join(warned(named(PREFIXES[1], metrics)))

    expected, far = (advice(mismatch_over_expected=over) for over in (1.2, 2.4))
    assert band in expected
    assert "calibrate" not in expected
    assert "widen" not in far
    assert "rollout.dtype" in far
    assert f"{band} if mismatch_over_expected is about 1, else raise the precision" in advice()
    assert "tighten" not in expected + far + advice()


def test_decoupled_mode_is_not_told_to_become_decoupled() -> None:
    assert warned({"actor/clip_fraction": 0.5}) == ()
    (warning,) = warned({"actor/clip_fraction": 0.51})
    assert "bypass_mode=False or raise actor.diffusion_loss.clip_ratio" in warning
    ill = {f"rollout_corr/{metric}": value for metric, _, value in THRESHOLDS[1:]}
    ill |= {"actor/clip_fraction": 0.51} | named(PREFIXES[0], FLOOR)
    warnings = warned(ill, bypass_mode=False)
    assert len(warnings) > 8
    assert not any("bypass_mode" in warning for warning in warnings)


def test_pinned_weight_knows_its_bound() -> None:
    metrics = {"rollout_corr/rollout_is_max": 3.0}
    for bound, number in {5.0: 0, 3.0: 1, "0.5_3.0": 1, "0.5_3.1": 0}.items():
        assert len(warned(metrics, rollout_is_threshold=bound)) == number
    assert warned(metrics, rollout_is=None) == ()


@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
def test_non_finite_values_are_one_warning_and_absent_ones_none(value: float | None) -> None:
    assert check_rollout_correction_health({}, settings_of())
    assert warned({"reward/mean": value, "timing_s/update": 3.0}) == ()
    metrics = {"actor/pg_loss": value, "actor/rollout_corr/kl": value, "actor/lr": 1e-4}
    (warning,) = warned(metrics)
    assert "actor/pg_loss (and 1 more) is not finite" in warning


FLOOR = {"pre_update_clip_fraction": 0.62, "mismatch_over_clip": 1.8}
FLOOR["logprob_abs_diff_p99"] = 3.1e-4


def test_clipping_by_noise_says_how_wide_a_band_would_do() -> None:
    prefix = PREFIXES[1]
    assert warned(named(prefix, FLOOR | {"pre_update_clip_fraction": 0.3})) == ()
    (warning,) = warned(named(prefix, FLOOR))
    assert warning.startswith(f"{prefix}pre_update_clip_fraction is 0.62, above 0.3: ")
    assert "half of them differ by 1.8 times the clip band or more" in warning
    wider = "bypass_mode=False, or take actor.diffusion_loss.clip_ratio >= 0.0004 (99% differ by"
    assert wider in warning
    assert "fp32 latents in the engine" in warning


TOKENS = "token_loss.clip_ratio_low and clip_ratio_high >= 0.0004"


@pytest.mark.parametrize(
    ("changed", "words", "absent"),
    [
        (Config(), "clipped by noise", "age"),
        (Config(rollout=RolloutConfig(staleness=1)), "the age of their policy", "noise fp32"),
        (Config(data=DataConfig(replay_dir="x")), "the age of their policy", "noise fp32"),
        (Config(model=ModelConfig(kind="causal_lm")), TOKENS, "diffusion_loss latents"),
    ],
)
def test_a_run_knows_what_it_trains_on(changed: Config, words: str, absent: str) -> None:
    changed.model.path = "a/b"
    monitor = make_health(resolved(changed))
    row = named(PREFIXES[0], FLOOR)
    (warning,) = [text for step in range(1, 6) for text in monitor.update(step, row)]
    assert words in warning
    assert not any(word in warning for word in absent.split())


def test_a_fault_is_not_answered_with_a_wider_band() -> None:
    monitor = monitor_of()
    fault = {"mismatch_over_expected": 3.0}
    row = named(PREFIXES[1], FLOOR | fault) | {"actor/clip_fraction": 0.62}
    warned = [monitor.update(step, row) for step in range(1, 6)]
    assert [len(texts) for texts in warned] == [1, 0, 0, 0, 0]
    assert "flowgrpo-rc calibrate" in warned[0][0]
    later = [monitor.update(step, named(PREFIXES[1], FLOOR)) for step in range(6, 11)]
    assert [len(texts) for texts in later] == [0, 0, 1, 0, 0]
    assert "clip_ratio >=" in later[2][0]


OVER = "rollout_corr/mismatch_over_expected"
PLAIN = "rollout.quantization"


@pytest.mark.parametrize(
    ("metric", "share", "healthy", "ill", "words"),
    [
        ("rollout/latents_16bit_fraction", None, 0.5, 1.0, "16 bits"),
        ("rollout/noise_variance_off", None, 0.05, 0.051, "noise of another size"),
        ("rollout/noise_shared_max", None, 0.5, 0.51, "same noise for several samples or steps"),
        ("rollout/noise_of_seed_min", None, 0.5, 0.49, "draws other noise"),
        ("rollout/conditioning_error_max", None, 0.5, 0.51, "encodes other prompts than it is"),
        (OVER, None, 0.0, None, ""),
        (OVER, 0.0, 0.1, 0.099, PLAIN),  # fp32 with any quantization
        (OVER, 0.083, 0.166, 0.165, PLAIN),  # bf16 with int4
        (OVER, 0.25, 0.5, 0.49, PLAIN),
        (OVER, 0.28, 0.0, None, ""),  # bf16 with fp8: rounding is too large a part of it
    ],
)
def test_what_a_rollout_must_be_is_reported_at_once(
    metric: str, share: float | None, healthy: float, ill: float | None, words: str
) -> None:
    monitor = monitor_of(unquantized=share)
    assert monitor.update(1, {metric: healthy}) == []
    if ill is not None:
        (warning,) = monitor.update(2, {metric: ill})
        assert warning.startswith(f"{metric} is {ill:.4g}, {'below ' * (words == PLAIN)}")
        assert words in warning


def test_a_run_knows_what_its_quantization_explains() -> None:
    for quantization, explains in ((None, False), ("int8", False), ("int4", True)):
        rollout = RolloutConfig(quantization=quantization)
        config = Config(model=ModelConfig(path="a/b"), rollout=rollout)
        warnings = make_health(resolved(config)).update(1, {OVER: 0.08})
        assert bool(warnings) == explains


EQUAL = {"zero_std_ratio": 0.95, "reward/mean": 0.5, "reward/std": 0.2}
EQUAL |= {"advantages/single_ratio": 0.0, "advantages/identical_ratio": 0.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward/std": 1e-9}, "the reward is 0.5 for every sample of every prompt"),
        ({"advantages/single_ratio": 0.95}, "reward/failed_fraction"),
        ({"advantages/identical_ratio": 0.95}, "they are identical; raise rollout.algo.noise"),
        ({}, "raise rollout.n or rollout.algo.noise_level"),
    ],
)
def test_groups_without_advantages_are_reported_with_the_reason(
    changes: dict[str, float], words: str
) -> None:
    monitor = monitor_of()
    healthy = {"zero_std_ratio": 0.9}
    rows = [EQUAL | changes | healthy] * 3 + [EQUAL | changes] * 4
    warnings = [monitor.update(step, row) for step, row in enumerate(rows, start=1)]
    assert [len(texts) for texts in warnings] == [0, 0, 0, 0, 0, 1, 0]
    assert warnings[5][0].startswith("zero_std_ratio is 0.95, above 0.9: ")
    assert words in warnings[5][0]


def test_updates_that_eps_drowns_are_reported_after_the_first_steps() -> None:
    """The gradients of a new LoRA's A, about half of its elements, are small at first."""
    monitor = monitor_of()
    name = "actor/adam_eps_fraction"
    assert run(monitor, name, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.51, 0.51]) == []
    (warning,) = monitor.update(9, {name: 0.51})
    assert warning.startswith(f"{name} is 0.51, above 0.5: ")
    assert all(key in warning for key in ("model.lora_alpha", "actor.optim.clip_grad", "grpo"))


SIZE = "rollout_corr/rollout_is_eff_sample_size"


def run(monitor: HealthMonitor, metric: str, values: Sequence[float], first: int = 1) -> list[int]:
    """Returns the steps with a warning."""
    steps = enumerate(values, start=first)
    return [step for step, value in steps if monitor.update(step, {metric: value})]


def sizes(letters: str) -> list[float]:
    """Returns an ill size for an `i`, and a healthy one for an `h`."""
    return [0.1 if letter == "i" else 0.9 for letter in letters]


@pytest.mark.parametrize(
    ("metric", "values", "text", "steps"),
    [
        (SIZE, sizes("i" * 20), False, [3]),
        (SIZE, sizes("hihihii"), False, [6]),
        (SIZE, sizes("iiihhhiii"), False, [3]),  # wavering around a majority is one onset
        (SIZE, sizes("iiihhhhhiii"), False, [3, 11]),  # a clean window ends it
        # At once, and once.
        ("actor/pg_loss", [1.0, math.nan, math.nan, *[1.0] * 5, math.nan], False, [2, 9]),
        # A few unlikely tokens can double the mean of a step; images have no such tokens.
        (OVER, [3.0, 1.0, 1.0, 3.0, 3.0], False, [1]),
        (OVER, [3.0, 1.0, 1.0, 3.0, 3.0], True, [5]),
    ],
)
def test_majority_of_the_window_warns_once_per_onset(
    metric: str, values: list[float], text: bool, steps: list[int]
) -> None:
    assert run(monitor_of(text=text), metric, values) == steps


def test_steps_without_the_metric_do_not_count_and_the_onset_says_how_often() -> None:
    monitor = monitor_of()
    rows = [{"rollout_corr/kl": 0.5} if step % 2 else {} for step in range(1, 8)]
    warnings = [monitor.update(step, row) for step, row in enumerate(rows, start=1)]
    assert [step for step, texts in enumerate(warnings, start=1) if texts] == [5]
    assert warnings[4][0].endswith("(3 of the last 3 steps).")


@pytest.mark.parametrize("cut", [1, 4])
def test_resumed_monitor_warns_like_an_uninterrupted_one(cut: int) -> None:
    values = sizes("ihiihhhhhiiiii")
    whole = monitor_of()
    expected = run(whole, SIZE, values)
    first = monitor_of()
    second = monitor_of()
    warned = run(first, SIZE, values[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert warned + run(second, SIZE, values[cut:], first=cut + 1) == expected == [4, 12]
    assert second.state_dict() == whole.state_dict()

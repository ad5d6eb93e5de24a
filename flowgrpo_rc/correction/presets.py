"""The documents' presets, in the older and the newer spelling. Each is a starting point: further
keys refine it.

All take the plain log-ratio, as the documents do (`centered=false`).

IS: importance weights. RS: rejection. Geometric: mean log-ratio of a sequence. pg: `reinforce`,
without a PPO clip.
"""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

Threshold = float | str
Settings = dict[str, object]
GEOMETRIC_BAND = "0.999_1.001"
BYPASS: Settings = {"bypass_mode": True}
PG: Settings = {"bypass_mode": True, "loss_type": "reinforce"}


def _token(threshold: Threshold = 2.0) -> Settings:
    """Weighs each step."""
    return {"rollout_is": "token", "rollout_is_threshold": threshold}


def _sequence(threshold: Threshold = 2.0) -> Settings:
    """Weighs whole sequences by the product of their ratios."""
    return {"rollout_is": "sequence", "rollout_is_threshold": threshold}


def _icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Settings:
    """Weighs each step; a weight outside the two thresholds becomes 0."""
    return _token(f"{threshold_lower}_{threshold}")


def _rejection(criterion: str, threshold: Threshold, lower: float | None = None) -> Settings:
    return {
        "rollout_rs": criterion,
        "rollout_rs_threshold": threshold,
        "rollout_rs_threshold_lower": lower,
    }


def _geometric(rs_threshold: Threshold = GEOMETRIC_BAND) -> Settings:
    """Rejects sequences by the geometric mean of the ratios."""
    return _rejection("seq_mean_k1", rs_threshold)


def _k3(rs_threshold: Threshold = 0.01) -> Settings:
    """Rejects sequences by the mean of k3, an estimate of the KL."""
    return _rejection("seq_mean_k3", rs_threshold)


def _with_veto(
    rs_threshold: Threshold = GEOMETRIC_BAND,
    rs_threshold_lower: float | None = None,
    veto_threshold: float | None = 1e-4,
) -> Settings:
    """Rejects by the geometric mean, with a veto on single steps.

    The veto is that of the mathematics document; current verl has none (veto_threshold=None).
    """
    band = _rejection("seq_mean_k1", rs_threshold, rs_threshold_lower)
    return band | {"rollout_token_veto_threshold": veto_threshold}


def _seq_is_rs(
    is_threshold: Threshold = 2.0,
    rs_threshold: Threshold = "0.5_2.0",
    rs_threshold_lower: float | None = None,
) -> Settings:
    """Weighs whole sequences, and rejects those whose product lies outside a band."""
    band = _rejection("seq_sum_k1", rs_threshold, rs_threshold_lower)
    return _sequence(is_threshold) | band


def _mis(lower: float = 0.5, upper: float = 2.0) -> Settings:
    """Weighs each step; steps whose weight lies outside the bounds leave the mask."""
    return _token(f"{lower}_{upper}") | {"rollout_is_mode": "mask"}


def _mis_veto(lower: float = 0.5, upper: float = 2.0, veto_threshold: float = 1e-4) -> Settings:
    return _mis(lower, upper) | {"rollout_token_veto_threshold": veto_threshold}


def _both(
    weights: Callable[..., Settings], rejection: Callable[..., Settings]
) -> Callable[..., Settings]:
    """Joins weights, whose threshold is `is_threshold`, and a rejection."""

    def settings(is_threshold: Threshold = 2.0, *of_rejection: object, **named: object) -> Settings:
        return weights(is_threshold) | rejection(*of_rejection, **named)

    settings.__doc__ = f"{weights.__doc__} {rejection.__doc__}"
    return settings


def _preset(settings: Callable[..., Settings], mode: Settings | None = None) -> Any:
    """Makes a constructor with the arguments of `settings`; the mode is decoupled without one."""

    def make(cls: type, *arguments: object, **named: object) -> object:
        return cls(centered=False, **(mode or {}), **settings(*arguments, **named))

    # What help() shows of it.
    make.__doc__ = settings.__doc__
    cls = Parameter("cls", Parameter.POSITIONAL_ONLY)
    parameters = [cls, *signature(settings).parameters.values()]
    make.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return classmethod(make)


class Presets:
    """Named constructors of `RolloutCorrectionConfig`; a public name here is a preset that
    `preset=NAME` knows.
    """

    # Decoupled mode: rollout, old and current policy. `disabled` reports metrics only.
    disabled: ClassVar = _preset(lambda: {})
    decoupled_token_is: ClassVar = _preset(_token)
    decoupled_seq_is: ClassVar = _preset(_sequence)
    decoupled_token_icepop: ClassVar = _preset(_icepop)
    decoupled_seq_is_rs: ClassVar = _preset(_seq_is_rs)
    seq_mis: ClassVar = _preset(lambda threshold=2.0: _seq_is_rs(threshold, threshold, 0.0))
    decoupled_geo_rs: ClassVar = _preset(_with_veto)
    decoupled_geo_rs_seq_tis: ClassVar = _preset(_both(_sequence, _geometric))
    decoupled_geo_rs_token_tis: ClassVar = _preset(_both(_token, _geometric))
    decoupled_k3_rs: ClassVar = _preset(_k3)
    decoupled_k3_rs_seq_tis: ClassVar = _preset(_both(_sequence, _k3))
    decoupled_k3_rs_token_tis: ClassVar = _preset(_both(_token, _k3))

    # Bypass mode with the PPO clip: the ratio current / rollout is the weight.
    bypass_ppo_clip: ClassVar = _preset(lambda: {}, BYPASS)
    ppo_is_bypass: ClassVar = _preset(_token, BYPASS)
    bypass_ppo_clip_geo_rs: ClassVar = _preset(_geometric, BYPASS)
    bypass_ppo_clip_k3_rs: ClassVar = _preset(_k3, BYPASS)

    # Bypass mode without a clip: off-policy REINFORCE.
    bypass_pg_is: ClassVar = _preset(_sequence, PG)
    pg_rs: ClassVar = _preset(_with_veto, PG)
    bypass_pg_token_icepop: ClassVar = _preset(_icepop, PG)
    bypass_pg_geo_rs: ClassVar = _preset(_geometric, PG)
    bypass_pg_geo_rs_seq_tis: ClassVar = _preset(_both(_sequence, _geometric), PG)
    bypass_pg_geo_rs_token_tis: ClassVar = _preset(_both(_token, _geometric), PG)

    # The older names of some, and slime's combinations.
    token_is: ClassVar = decoupled_token_is
    seq_is: ClassVar = decoupled_seq_is
    seq_is_rs: ClassVar = decoupled_seq_is_rs
    geo_rs: ClassVar = decoupled_geo_rs
    pg_is: ClassVar = bypass_pg_is
    pure_is: ClassVar = bypass_pg_is
    slime_tis: ClassVar = _preset(lambda upper=2.0: _token(upper))
    slime_mis: ClassVar = _preset(_mis)
    slime_mis_veto: ClassVar = _preset(_mis_veto)


PRESETS = tuple(sorted(name for name in vars(Presets) if not name.startswith("_")))

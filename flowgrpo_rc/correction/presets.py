"""The documents' presets, in the older and the newer spelling. Each is a starting point: further
keys refine it.

All take the plain log-ratio, as the documents do (`centered=false`).

IS: importance weights. RS: rejection. Geometric: mean log-ratio of a sequence. pg: `reinforce`,
without a PPO clip.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

Threshold = float | str
GEOMETRIC_BAND = "0.999_1.001"


class Presets:
    """Named constructors of `RolloutCorrectionConfig`; a public method here is a preset that
    `preset=NAME` knows.
    """

    # Decoupled mode: rollout, old and current policy.

    @classmethod
    def disabled(cls) -> Self:
        """Reports metrics only: nothing is weighted, and only what is not finite is rejected."""
        return cls._make()

    @classmethod
    def decoupled_token_is(cls, threshold: Threshold = 2.0) -> Self:
        """Weighs each step, cut at `threshold`: truncated importance sampling."""
        return cls._make(**_weights("token", threshold))

    @classmethod
    def decoupled_seq_is(cls, threshold: Threshold = 2.0) -> Self:
        """Weighs whole sequences by the product of their ratios, cut at `threshold`."""
        return cls._make(**_weights("sequence", threshold))

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Weighs each step; a weight outside the two thresholds becomes 0."""
        return cls._make(**_weights("token", f"{threshold_lower}_{threshold}"))

    @classmethod
    def decoupled_seq_is_rs(
        cls,
        is_threshold: Threshold = 2.0,
        rs_threshold: Threshold = "0.5_2.0",
        rs_threshold_lower: float | None = None,
    ) -> Self:
        """Weighs whole sequences, and rejects those whose product lies outside a band."""
        return cls._make(
            **_weights("sequence", is_threshold),
            rollout_rs="seq_sum_k1",
            rollout_rs_threshold=rs_threshold,
            rollout_rs_threshold_lower=rs_threshold_lower,
        )

    @classmethod
    def seq_mis(cls, threshold: float = 2.0) -> Self:
        """Is `seq_is_rs` with one threshold and no lower bound."""
        return cls.decoupled_seq_is_rs(threshold, threshold, 0.0)

    @classmethod
    def decoupled_geo_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 1e-4,
    ) -> Self:
        """Rejects sequences by the geometric mean of the ratios, with a veto on single steps.

        The veto is that of the mathematics document; current verl has none (veto_threshold=None).
        """
        return cls._make(
            **_geometric(rs_threshold, rs_threshold_lower),
            rollout_token_veto_threshold=veto_threshold,
        )

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = GEOMETRIC_BAND
    ) -> Self:
        """Rejects by the geometric mean of the ratios, and weighs whole sequences."""
        return cls._make(**_weights("sequence", is_threshold), **_geometric(rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = GEOMETRIC_BAND
    ) -> Self:
        """Rejects by the geometric mean of the ratios, and weighs each step."""
        return cls._make(**_weights("token", is_threshold), **_geometric(rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Rejects sequences by the mean of k3, an estimate of the KL."""
        return cls._make(**_k3(rs_threshold))

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: float = 0.01
    ) -> Self:
        """Rejects by the mean of k3, and weighs whole sequences."""
        return cls._make(**_weights("sequence", is_threshold), **_k3(rs_threshold))

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: float = 0.01
    ) -> Self:
        """Rejects by the mean of k3, and weighs each step."""
        return cls._make(**_weights("token", is_threshold), **_k3(rs_threshold))

    # Bypass mode with the PPO clip: the ratio current / rollout is the weight.

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        """Takes the rollout for the old policy, with PPO's clip and no rejection."""
        return cls._make(bypass_mode=True)

    @classmethod
    def ppo_is_bypass(cls, threshold: Threshold = 2.0) -> Self:
        """As `bypass_ppo_clip`, with the token weights as metrics."""
        return cls._make(bypass_mode=True, **_weights("token", threshold))

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold = GEOMETRIC_BAND) -> Self:
        """Is `bypass_ppo_clip` with rejection by the geometric mean of the ratios."""
        return cls._make(bypass_mode=True, **_geometric(rs_threshold))

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Is `bypass_ppo_clip` with rejection by the mean of k3."""
        return cls._make(bypass_mode=True, **_k3(rs_threshold))

    # Bypass mode without a clip: off-policy REINFORCE.

    @classmethod
    def bypass_pg_is(cls, threshold: Threshold = 2.0) -> Self:
        """Uses REINFORCE with weights of whole sequences, without a clip."""
        return cls._pg(**_weights("sequence", threshold))

    @classmethod
    def pg_rs(
        cls,
        rs_threshold: Threshold = GEOMETRIC_BAND,
        rs_threshold_lower: float | None = None,
        veto_threshold: float | None = 1e-4,
    ) -> Self:
        """Uses REINFORCE with rejection by the geometric mean of the ratios, and a veto."""
        return cls._pg(
            **_geometric(rs_threshold, rs_threshold_lower),
            rollout_token_veto_threshold=veto_threshold,
        )

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Uses REINFORCE with weights of steps; one outside its bounds becomes 0."""
        return cls._pg(**_weights("token", f"{threshold_lower}_{threshold}"))

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold = GEOMETRIC_BAND) -> Self:
        """Uses REINFORCE with rejection by the geometric mean of the ratios."""
        return cls._pg(**_geometric(rs_threshold))

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = GEOMETRIC_BAND
    ) -> Self:
        """Uses REINFORCE, rejects by the geometric mean, and weighs whole sequences."""
        return cls._pg(**_weights("sequence", is_threshold), **_geometric(rs_threshold))

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: Threshold = 2.0, rs_threshold: Threshold = GEOMETRIC_BAND
    ) -> Self:
        """Uses REINFORCE, rejects by the geometric mean, and weighs each step."""
        return cls._pg(**_weights("token", is_threshold), **_geometric(rs_threshold))

    # The older names of some; `ClassVar` keeps them out of the dataclass's fields.

    token_is: ClassVar = decoupled_token_is
    seq_is: ClassVar = decoupled_seq_is
    seq_is_rs: ClassVar = decoupled_seq_is_rs
    geo_rs: ClassVar = decoupled_geo_rs
    pg_is: ClassVar = bypass_pg_is
    pure_is: ClassVar = bypass_pg_is

    # slime's combinations.

    @classmethod
    def slime_tis(cls, upper: float = 2.0) -> Self:
        """Weighs each step, cut at `upper`."""
        return cls._make(**_weights("token", upper))

    @classmethod
    def slime_mis(cls, lower: float = 0.5, upper: float = 2.0) -> Self:
        """Weighs each step; steps whose weight lies outside the bounds leave the mask."""
        return cls._make(
            rollout_is="token", rollout_is_mode="mask", rollout_is_threshold=f"{lower}_{upper}"
        )

    @classmethod
    def slime_mis_veto(
        cls, lower: float = 0.5, upper: float = 2.0, veto_threshold: float = 1e-4
    ) -> Self:
        """Is `slime_mis` with a veto on single steps."""
        return cls._make(
            rollout_is="token",
            rollout_is_mode="mask",
            rollout_is_threshold=f"{lower}_{upper}",
            rollout_token_veto_threshold=veto_threshold,
        )

    @classmethod
    def _make(cls, **settings: Any) -> Self:
        # The documents know the plain log-ratio alone.
        return cls(**{"centered": False, **settings})

    @classmethod
    def _pg(cls, **settings: Any) -> Self:
        return cls._make(**{"bypass_mode": True, "loss_type": "reinforce", **settings})


def _weights(level: str, threshold: Threshold) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _geometric(threshold: Threshold, lower: float | None = None) -> dict[str, Any]:
    return {
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": threshold,
        "rollout_rs_threshold_lower": lower,
    }


def _k3(threshold: float) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": threshold}


PRESETS = tuple(sorted(name for name in vars(Presets) if not name.startswith("_")))

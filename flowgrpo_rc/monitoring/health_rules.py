"""The thresholds on a step's metrics, each with the advice that goes with it.

The thresholds are those of the rollout-correction documents:
https://verl.readthedocs.io/en/latest/algo/rollout_corr.html and its diffusion counterpart. What a
rollout must be (its latents, its noise, its prompts) is judged here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig

# Relative difference of a token's embeddings above which the token, or the encoder, is another one.
OTHER_PROMPT = 0.5

_KEY = "algorithm.rollout_correction"


class Setup(NamedTuple):
    """Holds what the rules know of a rollout correction; its settings are parsed once.

    Attributes:
      recompute: the setting that takes old log-probs from the training graph; None if they are.
      weight_bound: upper bound of the importance weights; None without weights.
      criteria: the rejection criteria as the user wrote them; empty for none.
      keeps_rejected: whether rejected steps stay in the denominator.
    """

    recompute: str | None
    weight_bound: float | None
    criteria: str
    keeps_rejected: bool

    @classmethod
    def of(cls, config: RolloutCorrectionConfig) -> Setup:
        """Parses the settings of a correction."""
        rules = config.rules()
        return cls(
            recompute=f"{_KEY}.bypass_mode=False" if config.corrects_in_loss else None,
            weight_bound=None if rules.level is None else rules.bounds.upper,
            criteria=str(config.rollout_rs) if config.rollout_rs else "",
            keeps_rejected=config.normalize != "kept",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A threshold on a metric.

    Attributes:
      name: the rule.
      metric: the metric, without prefix.
      judge: returns the threshold that was crossed, in words, or None.
      advice: returns the rest of the sentence.
      immediate: whether one step is enough, since the metric cannot waver.
    """

    name: str
    metric: str
    judge: Callable[[float, Setup], str | None]
    advice: Callable[[Setup], str]
    immediate: bool = False


def _above(bound: float) -> Callable[[float, Setup], str | None]:
    return lambda value, _: f"above {bound:g}" if value > bound else None


def _below(bound: float) -> Callable[[float, Setup], str | None]:
    return lambda value, _: f"below {bound:g}" if value < bound else None


def _outside(lower: float, upper: float) -> Callable[[float, Setup], str | None]:
    return lambda value, _: None if lower <= value <= upper else f"outside [{lower:g}, {upper:g}]"


def _pinned_at_bound(value: float, setup: Setup) -> str | None:
    bound = setup.weight_bound
    # A weight that was clamped in fp32 may come back a rounding error below the bound.
    if bound is None or value < bound * (1 - 1e-6):
        return None
    return f"at or above its bound {bound:g}"


def narrow_the_gap(setup: Setup) -> str:
    """Returns the advice that makes rollout and training graph differ less."""
    precision = "raise the precision of the rollout (rollout.dtype)"
    return f"{precision} or set {setup.recompute}" if setup.recompute else precision


def _drift(setup: Setup) -> str:
    return (
        f"the rollout drifts away from the training graph; {narrow_the_gap(setup)}, or tighten "
        f"{_band(setup)}"
    )


def _diluted(value: float, setup: Setup) -> str | None:
    return _above(0.10)(value, setup) if setup.keeps_rejected else None


def _dilution(setup: Setup) -> str:
    widen = f"widen {_band(setup)}, or set {_KEY}.normalize=kept"
    return f"rejected samples stay in the mean and dilute the gradient; {widen}"


def _band(setup: Setup) -> str:
    criteria = f" of {setup.criteria}" if setup.criteria else ""
    return f"{_KEY}.rollout_rs_threshold{criteria}"


_SPREAD = (
    f"few samples carry the gradient; lower {_KEY}.rollout_is_threshold or set "
    f"{_KEY}.rollout_is=token"
)


def _clipping(reason: str) -> Callable[[Setup], str]:
    widen = (
        "raise actor.diffusion_loss.clip_ratio, or the k of auto:k (for text "
        "actor.token_loss.clip_ratio_low and clip_ratio_high)"
    )

    def advise(setup: Setup) -> str:
        recompute = f"set {setup.recompute} or " if setup.recompute else ""
        return f"{reason}; {recompute}{widen}"

    return advise


RULES = (
    Rule(name="drift", metric="rollout_rs_seq_masked_fraction", judge=_above(0.05), advice=_drift),
    Rule(
        name="dilution", metric="rollout_rs_seq_masked_fraction", judge=_diluted, advice=_dilution
    ),
    Rule(
        name="log_ppl",
        metric="log_ppl_abs_diff",
        judge=_above(1.0),
        advice=lambda setup: (
            f"rollout and training disagree about the same samples; {narrow_the_gap(setup)}"
        ),
    ),
    Rule(
        name="is_max",
        metric="rollout_is_max",
        judge=_pinned_at_bound,
        advice=lambda setup: (
            f"weights are cut there; {narrow_the_gap(setup)}, or raise {_KEY}.rollout_is_threshold"
        ),
    ),
    Rule(
        name="is_mean",
        metric="rollout_is_mean",
        judge=_outside(0.5, 2.0),
        advice=lambda setup: (
            "the shift is systematic; check that rollout.calculate_log_probs=True and the "
            f"sampler's settings agree on both sides, and {narrow_the_gap(setup)}"
        ),
    ),
    Rule(
        name="veto",
        metric="rollout_is_veto_fraction",
        judge=_above(0.1),
        advice=lambda setup: (
            f"single steps are far off; {narrow_the_gap(setup)}, or lower "
            f"{_KEY}.rollout_token_veto_threshold"
        ),
    ),
    Rule(
        name="ess", metric="rollout_is_eff_sample_size", judge=_below(0.3), advice=lambda _: _SPREAD
    ),
    Rule(name="is_std", metric="rollout_is_std", judge=_above(1.0), advice=lambda _: _SPREAD),
    Rule(
        name="kl",
        metric="kl",
        judge=_outside(-0.1, 0.1),
        advice=lambda setup: (
            f"the policies are far apart; {narrow_the_gap(setup)}, or lower actor.optim.lr"
        ),
    ),
    Rule(
        name="chi2",
        metric="chi2_token",
        judge=_above(1.0),
        advice=lambda setup: f"the weights' variance is unusable; {narrow_the_gap(setup)}",
    ),
    Rule(
        name="clipping",
        metric="actor/clip_fraction",
        judge=_above(0.5),
        advice=_clipping("more than half of the steps are clipped and teach nothing"),
    ),
    Rule(
        name="rounded_latents",
        metric="rollout/latents_16bit_fraction",
        judge=_above(0.5),
        advice=lambda _: (
            "the engine stores latents in 16 bits, so that log-probs are those of other states; "
            "keep fp32"
        ),
        immediate=True,
    ),
    Rule(
        name="noise_variance",
        metric="rollout/noise_variance_off",
        judge=_above(0.05),
        advice=lambda _: (
            "the engine draws noise of another size than rollout.algo.noise_level says; draw "
            "standard normal noise"
        ),
        immediate=True,
    ),
    Rule(
        name="shared_noise",
        metric="rollout/noise_shared_max",
        judge=_above(0.5),
        advice=lambda _: (
            "the engine draws the same noise for several samples or steps, so that a group "
            "explores less than it seems to; give every sample and step noise of its own"
        ),
        immediate=True,
    ),
    Rule(
        name="noise_of_seed",
        metric="rollout/noise_of_seed_min",
        judge=_below(0.5),
        advice=lambda _: (
            "the engine says that it draws the noise of the samples' seeds (draws_seed_noise) and "
            "draws other noise, so that no sample can be repeated; use the seeds of the request"
        ),
        immediate=True,
    ),
    Rule(
        name="conditioning",
        metric="rollout/conditioning_error_max",
        judge=_above(OTHER_PROMPT),
        advice=lambda _: (
            "the engine encodes other prompts than it is given (stripped, whitespace collapsed, "
            "cut) or has another text encoder; flowgrpo-rc calibrate with the same settings looks "
            "for the cause"
        ),
        immediate=True,
    ),
)

"""The table of health rules: a metric, the bounds of a healthy value, what it means, a remedy.

The thresholds are those of the rollout-correction documents:
https://verl.readthedocs.io/en/latest/algo/rollout_corr.html and its diffusion counterpart. What a
rollout must be (its latents, its noise, its prompts) is judged here as well.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig

# Relative difference of a token's embeddings above which the token, or the encoder, is another one.
OTHER_PROMPT = 0.5

_KEY = "algorithm.rollout_correction"


class Setup(NamedTuple):
    """Holds what the rules know of a rollout correction; its settings are parsed once.

    Attributes:
      recompute: the setting that takes old log-probs from the training graph; "" if they are.
      weight_bound: upper bound of the importance weights; inf without weights.
      criteria: the rejection criteria as the user wrote them; "" for none.
      keeps_rejected: whether rejected steps stay in the denominator.
    """

    recompute: str
    weight_bound: float
    criteria: str
    keeps_rejected: bool

    @classmethod
    def of(cls, config: RolloutCorrectionConfig) -> Setup:
        """Parses the settings of a correction."""
        rules = config.rules()
        return cls(
            recompute=f"{_KEY}.bypass_mode=False" if config.corrects_in_loss else "",
            weight_bound=inf if rules.level is None else rules.bounds.upper,
            criteria=f" of {config.rollout_rs}" if config.rollout_rs else "",
            keeps_rejected=config.normalize != "kept",
        )

    @property
    def narrow(self) -> str:
        """The advice that makes rollout and training graph differ less."""
        precision = "raise the precision of the rollout (rollout.dtype)"
        return f"{precision} or set {self.recompute}" if self.recompute else precision


class Rule(NamedTuple):
    """A row of the table; `{narrow}` and the like in its words are filled from the setup."""

    name: str
    metric: str  # without prefix
    low: float
    high: float
    meaning: str
    remedy: str
    immediate: bool = False  # one step is enough, since the metric cannot waver

    def judge(self, value: float, setup: Setup) -> str | None:
        """Returns what was crossed, what it means and what helps; None for a healthy value."""
        diluted = self.name != "dilution" or setup.keeps_rejected
        if self.name == "is_max":
            # A weight that was clamped in fp32 may come back a rounding error below the bound.
            if value < setup.weight_bound * (1 - 1e-6):
                return None
            crossed = f"at or above its bound {setup.weight_bound:g}"
        elif self.low <= value <= self.high or not diluted:
            return None
        elif self.low == -inf:
            crossed = f"above {self.high:g}"
        elif self.high == inf:
            crossed = f"below {self.low:g}"
        else:
            crossed = f"outside [{self.low:g}, {self.high:g}]"
        remedy = self.remedy.format(
            key=_KEY,
            narrow=setup.narrow,
            band=f"{_KEY}.rollout_rs_threshold{setup.criteria}",
            recompute=f"set {setup.recompute} or " if setup.recompute else "",
        )
        return f"{crossed}: {self.meaning}; {remedy}"


_SPREAD = "lower {key}.rollout_is_threshold or set {key}.rollout_is=token"
RULES = (
    Rule(
        *("drift", "rollout_rs_seq_masked_fraction", -inf, 0.05),
        "the rollout drifts away from the training graph",
        "{narrow}, or tighten {band}",
    ),
    Rule(
        *("dilution", "rollout_rs_seq_masked_fraction", -inf, 0.10),
        "rejected samples stay in the mean and dilute the gradient",
        "widen {band}, or set {key}.normalize=kept",
    ),
    Rule(
        *("log_ppl", "log_ppl_abs_diff", -inf, 1.0),
        "rollout and training disagree about the same samples",
        "{narrow}",
    ),
    Rule(
        *("is_max", "rollout_is_max", -inf, inf),
        "weights are cut there",
        "{narrow}, or raise {key}.rollout_is_threshold",
    ),
    Rule(
        *("is_mean", "rollout_is_mean", 0.5, 2.0),
        "the shift is systematic",
        "check that rollout.calculate_log_probs=True and the sampler's settings agree on both "
        "sides, and {narrow}",
    ),
    Rule(
        *("veto", "rollout_is_veto_fraction", -inf, 0.1),
        "single steps are far off",
        "{narrow}, or lower {key}.rollout_token_veto_threshold",
    ),
    Rule(
        *("ess", "rollout_is_eff_sample_size", 0.3, inf),
        "few samples carry the gradient",
        _SPREAD,
    ),
    Rule(
        *("is_std", "rollout_is_std", -inf, 1.0),
        "few samples carry the gradient",
        _SPREAD,
    ),
    Rule(
        *("kl", "kl", -0.1, 0.1),
        "the policies are far apart",
        "{narrow}, or lower actor.optim.lr",
    ),
    Rule(
        *("chi2", "chi2_token", -inf, 1.0),
        "the weights' variance is unusable",
        "{narrow}",
    ),
    Rule(
        *("clipping", "actor/clip_fraction", -inf, 0.5),
        "more than half of the steps are clipped and teach nothing",
        "{recompute}raise actor.diffusion_loss.clip_ratio, or the k of auto:k (for text "
        "actor.token_loss.clip_ratio_low and clip_ratio_high)",
    ),
    Rule(
        *("rounded_latents", "rollout/latents_16bit_fraction", -inf, 0.5),
        "the engine stores latents in 16 bits, so that log-probs are those of other states",
        "keep fp32",
        immediate=True,
    ),
    Rule(
        *("noise_variance", "rollout/noise_variance_off", -inf, 0.05),
        "the engine draws noise of another size than rollout.algo.noise_level says",
        "draw standard normal noise",
        immediate=True,
    ),
    Rule(
        *("shared_noise", "rollout/noise_shared_max", -inf, 0.5),
        "the engine draws the same noise for several samples or steps, so that a group explores "
        "less than it seems to",
        "give every sample and step noise of its own",
        immediate=True,
    ),
    Rule(
        *("noise_of_seed", "rollout/noise_of_seed_min", 0.5, inf),
        "the engine says that it draws the noise of the samples' seeds (draws_seed_noise) and "
        "draws other noise, so that no sample can be repeated",
        "use the seeds of the request",
        immediate=True,
    ),
    Rule(
        *("conditioning", "rollout/conditioning_error_max", -inf, OTHER_PROMPT),
        "the engine encodes other prompts than it is given (stripped, whitespace collapsed, cut) "
        "or has another text encoder",
        "flowgrpo-rc calibrate with the same settings looks for the cause",
        immediate=True,
    ),
)

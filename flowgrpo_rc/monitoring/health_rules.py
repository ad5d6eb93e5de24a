"""The table of health rules: a metric, the bounds of a healthy value, what it means, a remedy.

The thresholds are those of the rollout-correction documents:
https://verl.readthedocs.io/en/latest/algo/rollout_corr.html and its diffusion counterpart. What a
rollout must be (its latents, its noise, its prompts) is judged here as well.
"""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.thresholds import KEY

MOST_CLIPPED = 0.3  # share of the differences that may lie outside the clip band
MOST_EQUAL = 0.9  # share of the groups whose rewards may all be equal
FAULT = 2.0  # mismatch over what the precisions explain, from which on it is a fault
# Relative difference of a token's embeddings above which the token, or the encoder, is another one.
OTHER_PROMPT = 0.5
# Below this multiple of what is left without a quantization, the quantization is not applied; only
# a quantization that makes the mismatch so much larger can be judged by it.
_UNQUANTIZED = 2.0
_LARGEST_SHARE = 0.25
_LEAST_BOUND = 0.1  # where nothing is left without it


class Setup(NamedTuple):
    """Holds what the rules know of a run; the settings of its correction are parsed once."""

    recompute: str  # the setting that takes old log-probs from the training graph; "" if they are
    weight_bound: float  # of the importance weights; inf without weights
    criteria: str  # of rejection, as the user wrote them; "" for none
    keeps_rejected: bool  # in the denominator
    text: bool  # samples are responses of a language model, not images
    fresh: bool  # the weights that are trained made the samples, and not older ones
    unquantized: float | None  # `unquantized_share` of the rollout; None where it tells nothing

    @classmethod
    def of(
        cls,
        config: RolloutCorrectionConfig,
        rules: Rules,
        *,
        text: bool,
        fresh: bool,
        unquantized: float | None,
    ) -> "Setup":
        """Takes the settings of a correction, and the same parsed."""
        is_clear = unquantized is not None and unquantized <= _LARGEST_SHARE
        return cls(
            recompute=f"{KEY}.bypass_mode=False" if config.bypass_mode else "",
            weight_bound=inf if rules.level is None else rules.bounds.upper,
            criteria=f" of {config.rollout_rs}" if config.rollout_rs else "",
            keeps_rejected=config.normalize != "kept",
            text=text,
            fresh=fresh,
            unquantized=unquantized if is_clear else None,
        )

    def words(self) -> dict[str, str]:
        """Returns what stands for `{narrow}` and the like in the words of a rule."""
        narrow = "raise the precision of the rollout (rollout.dtype)"
        return {
            "key": KEY,
            "narrow": f"{narrow} or set {self.recompute}" if self.recompute else narrow,
            "band": f"{KEY}.rollout_rs_threshold{self.criteria}",
            "recompute": f"set {self.recompute} or " if self.recompute else "",
            "cause": "noise" if self.fresh else "the age of their policy",
        }


class Rule(NamedTuple):
    """A row of the table; `{narrow}` and the like in its words are filled in."""

    name: str
    metric: str  # without prefix
    low: float
    high: float
    meaning: str  # and what helps
    immediate: bool = False  # one step is enough, since the metric cannot waver
    after: int = 0  # the steps at the start of a run that are not judged

    def judge(self, value: float, setup: Setup, words: Mapping[str, str]) -> str:
        """Returns what was crossed, what it means and what helps; "" for a healthy value."""
        low, high = self._bounds(setup)
        if low <= value <= high:
            return ""
        if self.name == "is_max":
            crossed = f"at or above its bound {setup.weight_bound:g}"
        elif low == -inf:
            crossed = f"above {high:.3g}"
        elif high == inf:
            crossed = f"below {low:.3g}"
        else:
            crossed = f"outside [{low:g}, {high:g}]"
        return f"{crossed}: {self.meaning.format(**words)}"

    def _bounds(self, setup: Setup) -> tuple[float, float]:
        match self.name:
            case "is_max":
                # A weight that was clamped in fp32 may come back a rounding error below the bound.
                return -inf, setup.weight_bound * (1 - 1e-6)
            case "dilution" if not setup.keeps_rejected:
                return -inf, inf
            case "unquantized":
                return max(_UNQUANTIZED * (setup.unquantized or 0.0), _LEAST_BOUND), inf
        return self.low, self.high


_SPREAD = (
    "few samples carry the gradient; lower {key}.rollout_is_threshold or set {key}.rollout_is=token"
)
RULES = (
    Rule(
        *("fault", "mismatch_over_expected", -inf, FAULT),
        "before any update, rollout and training graph differ by more than their precisions "
        "explain{mean}. The engine samples with other settings, roundings or weights than it "
        "should; flowgrpo-rc calibrate with the same settings looks for the cause",
        immediate=True,
    ),
    Rule(
        *("unquantized", "mismatch_over_expected", -inf, inf),
        "rollout and training graph differ by less than rollout.quantization makes them differ. "
        "The engine seems to sample with plain weights; see whether it applies the quantization",
        immediate=True,
    ),
    Rule(
        *("noise", "pre_update_clip_fraction", -inf, MOST_CLIPPED),
        "so many samples are clipped by {cause} before any update{half}; {ways}",
    ),
    Rule(*("drift", "rollout_rs_seq_masked_fraction", -inf, 0.05), "{rejects}"),
    Rule(
        *("dilution", "rollout_rs_seq_masked_fraction", -inf, 0.10),
        "rejected samples stay in the mean and dilute the gradient; widen {band}, or set "
        "{key}.normalize=kept",
    ),
    Rule(
        *("log_ppl", "log_ppl_abs_diff", -inf, 1.0),
        "rollout and training disagree about the same samples; {narrow}",
    ),
    Rule(
        *("is_max", "rollout_is_max", -inf, inf),
        "weights are cut there; {narrow}, or raise {key}.rollout_is_threshold",
    ),
    Rule(
        *("is_mean", "rollout_is_mean", 0.5, 2.0),
        "the shift is systematic; check that the engine records the log-probs of its own samples, "
        "with the sampler's settings, and {narrow}",
    ),
    Rule(
        *("veto", "rollout_is_veto_fraction", -inf, 0.1),
        "single steps are far off; {narrow}, or lower {key}.rollout_token_veto_threshold",
    ),
    Rule("ess", "rollout_is_eff_sample_size", 0.3, inf, _SPREAD),
    Rule("is_std", "rollout_is_std", -inf, 1.0, _SPREAD),
    Rule(*("kl", "kl", -0.1, 0.1), "the policies are far apart; {narrow}, or lower actor.optim.lr"),
    Rule(*("chi2", "chi2_token", -inf, 1.0), "the weights' variance is unusable; {narrow}"),
    Rule(
        *("clipping", "actor/clip_fraction", -inf, 0.5),
        "more than half of the steps are clipped and teach nothing; {recompute}raise "
        "actor.diffusion_loss.clip_ratio, or the k of auto:k (for text "
        "actor.token_loss.clip_ratio_low and clip_ratio_high)",
    ),
    Rule(
        *("adam_eps", "actor/adam_eps_fraction", -inf, 0.5),
        "gradients of so many LoRA elements are below AdamW's eps (1e-8, which no key sets) that "
        "most of the LoRA moves less than actor.optim.lr says. Larger gradients help: raise "
        "model.lora_alpha, or actor.optim.clip_grad where actor/grad_norm is above it, or take an "
        "algorithm.adv_estimator that divides by a standard deviation (flow_grpo, grpo); "
        "actor.optim.name=adamw_8bit has the same eps",
        after=3,  # a new LoRA starts with B = 0, so that A's gradients are small at first
    ),
    Rule("no_advantage", "zero_std_ratio", -inf, MOST_EQUAL, "{equal}"),
    Rule(
        *("rounded_latents", "rollout/latents_16bit_fraction", -inf, 0.5),
        "the engine stores latents in 16 bits, so that log-probs are those of other states; keep "
        "fp32",
        immediate=True,
    ),
    Rule(
        *("noise_variance", "rollout/noise_variance_off", -inf, 0.05),
        "the engine draws noise of another size than rollout.algo.noise_level says; draw standard "
        "normal noise",
        immediate=True,
    ),
    Rule(
        *("shared_noise", "rollout/noise_shared_max", -inf, 0.5),
        "the engine draws the same noise for several samples or steps, so that a group explores "
        "less than it seems to; give every sample and step noise of its own",
        immediate=True,
    ),
    Rule(
        *("noise_of_seed", "rollout/noise_of_seed_min", 0.5, inf),
        "the engine says that it draws the noise of the samples' seeds (draws_seed_noise) and "
        "draws other noise, so that no sample can be repeated; use the seeds of the request",
        immediate=True,
    ),
    Rule(
        *("conditioning", "rollout/conditioning_error_max", -inf, OTHER_PROMPT),
        "the engine encodes other prompts than it is given (stripped, whitespace collapsed, cut) "
        "or has another text encoder; flowgrpo-rc calibrate with the same settings looks for the "
        "cause",
        immediate=True,
    ),
)

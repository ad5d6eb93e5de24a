"""Settings of the rollout correction, `algorithm.rollout_correction` in the configuration."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from flowgrpo_rc.correction.presets import Presets
from flowgrpo_rc.correction.thresholds import (
    KEY,
    STEP_KL,
    Band,
    WeightBounds,
    parse_bands,
    parse_weight_bounds,
)
from flowgrpo_rc.correction.weights import IS_LEVELS
from flowgrpo_rc.plugins import check_choice, check_that, load_function

LOSS_TYPES = ("ppo_clip", "reinforce")
NORMALIZE = ("all", "kept")
BYPASS_LEVELS = ("step", "window")
LOG_PROB_SCALES = ("mean", "sum")
METRIC_NAMES = ("verl", "slime", "both")


class CustomCorrection(Protocol):
    """A user's function in place of the built-in weights and mask (`custom_correction`)."""

    def __call__(
        self,
        training_log_probs: Tensor,
        rollout_log_probs: Tensor,
        step_mask: Tensor,
        config: "RolloutCorrectionConfig",
        /,
    ) -> tuple[Tensor | None, Tensor]:
        """Computes weights and mask. No gradient flows through it.

        Args:
          training_log_probs: log-probs of the training graph, [B, T].
          rollout_log_probs: log-probs of the policy that sampled, [B, T].
          step_mask: bool, the steps that exist, [B, T].
          config: all settings of the rollout correction.

        Returns:
          The weights, [B, T], or None for none, and the steps that stay, bool [B, T].
        """


class Rules(NamedTuple):
    """The settings, parsed: what the maths applies."""

    level: str | None  # of the weights, one of `IS_LEVELS`; None without weights
    bounds: WeightBounds
    batch_normalize: bool  # whether weights are divided by their mean over the batch
    over_kept: bool  # whether that mean is over the kept steps only
    bands: tuple[Band, ...]  # the criteria whose bounds are numbers
    log_veto: float | None  # of the ratio below which a step rejects its sequence; None for none
    auto: tuple[Band, ...] = ()  # the criteria whose bounds follow the run: `AutoBands`

    @property
    def per_step(self) -> bool:
        """Whether steps are weighed, and not sequences. Without weights the metrics are those of
        steps.
        """
        return self.level in (None, "token")

    @property
    def needs_step_kl(self) -> bool:
        """Whether a criterion with a fixed threshold reads the exact KL of a step."""
        return any(band.name == STEP_KL for band in self.bands)

    @property
    def needs_means(self) -> bool:
        """Whether the rollout has to keep the means of its steps."""
        return any(band.name == STEP_KL for band in (*self.bands, *self.auto))


@dataclass(kw_only=True)
class RolloutCorrectionConfig(Presets):
    """What to do about the difference between the rollout policy and the training graph. The ratio
    below is training / rollout: old / rollout in decoupled mode, current / rollout in bypass mode.

    bypass_mode: True takes old := rollout and corrects inside the loss. False (decoupled)
        recomputes old with the training graph and corrects once per batch.
    loss_type: `ppo_clip`, or `reinforce` (importance weights without a clip; bypass mode only).
    centered: for images, credit the noise that the rollout drew: the log-ratio of the loss is
        `core.transition.centered_log_ratio`. Weights, criteria and metrics keep the log-probs. A
        run takes null as true for images whose rollout records its means; a loss takes it as false.
    rollout_is: importance weights of each step (`token`), of the whole sequence (`sequence`, the
        product), of its geometric mean (`geometric`), or null. In bypass mode with ppo_clip they
        are metrics: the ratio is the weight.
    rollout_is_mode: `truncate`, `clip`, `mask` or `icepop`; null: truncate for one threshold,
        icepop for two.
    rollout_is_threshold: upper bound of the weights, or "lower_upper".
    rollout_is_batch_normalize: divide the weights by their mean over the batch.
    rollout_rs: rejection criteria, one or several separated by commas: token_k1..k3,
        seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2, seq_max_k3, and the older names token, sequence
        and geometric; for images also step_kl, the exact KL between the Gaussians of a step.
    rollout_rs_threshold: a band "lower_upper" on the ratio for k1 (one number u means "1/u_u"), one
        positive upper bound for k2, k3 and step_kl; for images also "auto:k", k robust standard
        deviations about the running median of the mismatch before an update; one for all criteria
        or one for each. Null: the older names take rollout_is_threshold.
    rollout_rs_threshold_lower: lower bound of k1 bands whose threshold is one number.
    rollout_token_veto_threshold: reject a sequence if the ratio of any of its steps is below this.
    normalize: the loss is the mean over `all` steps, or over those that are `kept`. Null: all for
        images, kept for text. Batch normalisation is over all finite steps, and over kept ones only
        if `kept` is given.
    exclude_rejected: a sample whose steps are all rejected leaves the baseline of its group; null:
        in decoupled mode.
    bypass_level: what the correction of images sees in bypass mode: each `step` alone, or the
        sample's whole `window`, so that criteria and weights of sequences mean the trajectory. That
        takes one more forward of each step, unless `actor.steps_per_forward` covers the window.
    log_prob_scale: for study, images only: `sum` corrects by the sum of the log-density over latent
        elements, whose ratio is that of the densities; `mean` by their mean, as the loss does.
    metric_names: `verl`, `slime` or `both`.
    custom_correction: "module:function" in place of the built-in weights and mask; see
        `correction.config.CustomCorrection`.
    """

    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    centered: bool | None = None
    rollout_is: str | None = None
    rollout_is_mode: str | None = None
    rollout_is_threshold: Any = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Any = None
    rollout_rs_threshold: Any = None
    rollout_rs_threshold_lower: Any = None
    rollout_token_veto_threshold: float | None = None
    normalize: str | None = None
    exclude_rejected: bool | None = None
    bypass_level: str = "step"
    log_prob_scale: str = "mean"
    metric_names: str = "verl"
    custom_correction: str | None = None

    @property
    def excludes_rejected(self) -> bool:
        """Whether a sample without kept steps leaves the baseline of its group."""
        return not self.bypass_mode if self.exclude_rejected is None else self.exclude_rejected

    @property
    def weights_are_metrics(self) -> bool:
        """Whether `rollout_is` only reports: in bypass mode the PPO ratio is the weight."""
        return self.bypass_mode and self.loss_type == "ppo_clip"

    def rules(self) -> Rules:
        """Parses the settings, as the maths applies them; ValueError as in `validate`."""
        # The veto is compared with log-ratios: their exponentials could overflow.
        veto = self.rollout_token_veto_threshold
        bands = parse_bands(
            self.rollout_rs,
            self.rollout_rs_threshold,
            self.rollout_rs_threshold_lower,
            fallback=self.rollout_is_threshold,
        )
        return Rules(
            level=self.rollout_is,
            bounds=parse_weight_bounds(self.rollout_is_threshold, self.rollout_is_mode),
            batch_normalize=self.rollout_is_batch_normalize,
            over_kept=self.normalize == "kept",
            bands=tuple(band for band in bands if not band.auto),
            log_veto=None if veto is None else math.log(veto),
            auto=tuple(band for band in bands if band.auto),
        )

    def validate(self) -> Rules:
        """Returns the parsed settings. Raises ValueError for a wrong or contradictory one, naming
        the key and what is allowed.
        """
        self._validate_values()
        self._validate_contradictions()
        rules = self.rules()
        check_that(
            self.log_prob_scale == "mean" or self._scales_something(rules),
            f"{KEY}.log_prob_scale={self.log_prob_scale} has nothing to act on: it scales "
            f"weights ({KEY}.rollout_is), thresholds of k1 to k3 that are numbers, and the veto, "
            "but neither step_kl nor auto:k; set one of these, or drop it",
        )
        self.load_custom()
        return rules

    def _scales_something(self, rules: Rules) -> bool:
        """Whether `log_prob_scale` changes more than metrics."""
        # step_kl is no log-prob, and `auto` bands follow the mean of one in any case.
        scaled = any(band.name != STEP_KL for band in rules.bands) or rules.log_veto is not None
        return scaled or rules.level is not None or self.custom_correction is not None

    def load_custom(self) -> CustomCorrection | None:
        """Finds the function that `custom_correction` names; None if it is null, ValueError if
        there is none.
        """
        path = self.custom_correction
        if path is None:
            return None
        try:
            return load_function(str(path))
        except ValueError as error:
            raise ValueError(
                f"{KEY}.custom_correction={path!r}: give module:function ({error})"
            ) from error

    def _validate_values(self) -> None:
        choices: tuple[tuple[str, tuple[str | None, ...]], ...] = (
            ("loss_type", LOSS_TYPES),
            ("rollout_is", (None, *IS_LEVELS)),
            ("normalize", (None, *NORMALIZE)),
            ("bypass_level", BYPASS_LEVELS),
            ("log_prob_scale", LOG_PROB_SCALES),
            ("metric_names", METRIC_NAMES),
        )
        for name, allowed in choices:
            check_choice(f"{KEY}.{name}", vars(self)[name], allowed)
        # Python takes 1, 0 and "false" in conditions, where a user may mean something else.
        for name in ("bypass_mode", "rollout_is_batch_normalize", "centered"):
            value = vars(self)[name]
            may_be_null = name == "centered"
            words = "true, false or null" if may_be_null else "true or false"
            is_allowed = isinstance(value, bool) or (may_be_null and value is None)
            check_that(is_allowed, f"{KEY}.{name}={value!r}: give {words}")
        veto = self.rollout_token_veto_threshold
        check_that(
            veto is None or (isinstance(veto, Real) and 0 < veto < 1),
            f"{KEY}.rollout_token_veto_threshold={veto!r}: give a ratio between 0 and 1, such as "
            "1e-4",
        )

    def _validate_contradictions(self) -> None:
        weighs = self.rollout_is is not None
        levels = f"set {KEY}.rollout_is to one of {', '.join(IS_LEVELS)}, or drop it"
        ppo_in_bypass = f"{KEY}.bypass_mode=true and {KEY}.loss_type=ppo_clip"
        contradictions = (
            (
                self.loss_type == "reinforce" and not self.bypass_mode,
                "loss_type=reinforce compares the current policy with the rollout and needs "
                f"{KEY}.bypass_mode=true; set that, or loss_type=ppo_clip",
            ),
            (
                self.bypass_level != "step" and not self.bypass_mode,
                f"bypass_level={self.bypass_level} has no effect with {KEY}.bypass_mode=false, "
                "where the whole window is corrected: drop it, or set bypass_mode=true",
            ),
            (
                self.bypass_mode and bool(self.exclude_rejected),
                "exclude_rejected=true needs the rejection before the advantages, but with "
                f"{KEY}.bypass_mode=true it comes with the loss: set bypass_mode=false, or "
                "exclude_rejected=null",
            ),
            (
                self.rollout_is_mode is not None and not weighs,
                f"rollout_is_mode={self.rollout_is_mode} has no weights to act on: {levels}",
            ),
            (
                self.rollout_is_batch_normalize and not weighs,
                f"rollout_is_batch_normalize=true has no weights to act on: {levels}",
            ),
            (
                self.weights_are_metrics and self.rollout_is_batch_normalize,
                f"rollout_is_batch_normalize=true has no effect with {ppo_in_bypass}, whose ratio "
                "is the weight: set loss_type=reinforce, or drop it",
            ),
            (
                self.weights_are_metrics and self.rollout_is_mode == "mask",
                f"rollout_is_mode=mask has no effect with {ppo_in_bypass}, where rollout_is only "
                f"adds metrics: reject with {KEY}.rollout_rs instead",
            ),
        )
        for holds, message in contradictions:
            check_that(not holds, f"{KEY}.{message}")

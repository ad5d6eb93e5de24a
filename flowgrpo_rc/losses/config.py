"""Settings of the policy losses, `actor.diffusion_loss` and `actor.token_loss`."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.auto_clip import parse_auto
from flowgrpo_rc.losses.base import (
    DIFFUSION_KEY,
    REFERENCE_CLIP,
    REFERENCE_KL_THRESHOLD,
    TOKEN_KEY,
    DiffusionLoss,
    ImageLoss,
    TokenLoss,
)
from flowgrpo_rc.losses.find import check_effects, make_loss, option_names
from flowgrpo_rc.plugins import check_choice, check_that

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
# Keys of the sections that belong to some losses; the others are read outside of the loss.
DIFFUSION_OPTIONS = ("clip_ratio", "kl_threshold")
# What the studies clip at in decoupled mode, where the ratio starts at 1.
DECOUPLED_CLIP = 1e-3
TOKEN_OPTIONS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass(kw_only=True)
class DiffusionLossConfig:
    """The loss of images, under `loss_type=ppo_clip`.

    loss_mode: PPO's clip on the mean-pooled ratio, GRPO-Guard's on its own, or Flow-DPPO's bound on
        the divergence; DiffusionNFT, which trains on finished samples; or a class of your own
        (`DiffusionLoss`, `ForwardLoss`).
    clip_ratio: half-width of the PPO band of flow_grpo (on the mean-pooled ratio) and grpo_guard
        (on its own); a loss of your own may have it, too. "auto:k", in bypass mode: k robust
        standard deviations of the ratio before an update, at each step of the schedule, and no less
        than the band of the published recipe.
    adv_clip_max: advantages are clipped to +- this, with every loss; inf clips none, as verl-omni
        does under flow_dppo.
    kl_threshold: up to this KL of a step, mean over D, flow_dppo lets every update pass. "auto:k",
        in bypass mode: k^2 times the median KL before an update, and no less than the
        published bound.
    options: options that only one loss has; write each as `actor.diffusion_loss.NAME`.
    """

    loss_mode: str = "flow_grpo"
    clip_ratio: Any = REFERENCE_CLIP["gaussian"]
    adv_clip_max: float = 5.0
    kl_threshold: Any = REFERENCE_KL_THRESHOLD
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Takes a number that is written as text for a number, as for a key that is a float."""
        for name in DIFFUSION_OPTIONS:
            value = vars(self)[name]
            if isinstance(value, str):
                with suppress(ValueError):
                    setattr(self, name, float(value))

    @property
    def auto(self) -> dict[str, float]:
        """Option -> k, for each option that is "auto:k"; ValueError for one that is no number."""
        parsed = {name: parse_auto(name, vars(self)[name]) for name in DIFFUSION_OPTIONS}
        return {name: deviations for name, deviations in parsed.items() if deviations is not None}

    def loss(self) -> ImageLoss:
        """Returns the loss that `loss_mode` names, with its options.

        A loss takes numbers: the option's default stands for a bound that is "auto:k".

        Raises:
          ValueError: for an unknown loss, and for an option that the loss does not have or refuses.
        """
        defaults: dict[str, Any] = {name: vars(type(self))[name] for name in self.auto}
        section = replace(self, **defaults)
        loss: ImageLoss = make_loss(DIFFUSION_KEY, section, ImageLoss, DIFFUSION_OPTIONS)
        return loss

    def bounded(self, loss: DiffusionLoss, bound: Tensor) -> DiffusionLoss:
        """Returns a loss as `loss()` made it, but for a bound of each step, [B, T], in place of
        "auto:k". A loss of the user may read its options only when it is made.
        """
        names = option_names(type(loss))
        options = {name: vars(self)[name] for name in DIFFUSION_OPTIONS if name in names}
        return type(loss)(**options | dict.fromkeys(self.auto, bound) | self.options)

    def validate(self, made: ImageLoss | None = None) -> ImageLoss:
        """Returns the loss: `made`, if it was made before. Raises ValueError for a wrong setting,
        or for one without effect, naming its key.
        """
        auto = self.auto
        limits = {"clip_ratio": 1.0, "kl_threshold": math.inf}
        for name, limit in limits.items():
            value = vars(self)[name]
            allowed = "above 0" if limit == math.inf else f"between 0 and {limit:g}"
            message = f"{DIFFUSION_KEY}.{name}={value}: give a number {allowed}"
            check_that(name in auto or 0 < value < limit, message)
        message = f"{DIFFUSION_KEY}.adv_clip_max={self.adv_clip_max}: give a number above 0"
        check_that(self.adv_clip_max > 0, message)
        loss = self.loss() if made is None else made
        names = option_names(type(loss))
        check_effects(DIFFUSION_KEY, self, ImageLoss, DIFFUSION_OPTIONS, names)
        return loss


@dataclass(kw_only=True)
class TokenLossConfig:
    """The loss of text, under `loss_type=ppo_clip`.

    loss_mode: `ppo_clip`, `gspo` (one ratio for the sequence), or a class of your own
        (`TokenLoss`).
    clip_ratio_low: the ratio stays above 1 - this.
    clip_ratio_high: the ratio stays below 1 + this.
    clip_ratio_c: dual clip, an upper bound above 1 on the ratio where the advantage is negative;
        null for none.
    loss_agg_mode: `token-mean`, `seq-mean-token-sum` (Dr.GRPO's, up to a constant) or
        `seq-mean-token-mean` (GRPO's).
    options: options that only one loss has; write each as `actor.token_loss.NAME`.
    """

    loss_mode: str = "ppo_clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_mode: str = "token-mean"
    options: dict[str, Any] = field(default_factory=dict)

    def loss(self) -> TokenLoss:
        """Returns the loss that `loss_mode` names; ValueError for an unknown one."""
        loss: TokenLoss = make_loss(TOKEN_KEY, self, TokenLoss, TOKEN_OPTIONS)
        return loss

    def validate(self) -> TokenLoss:
        """Returns the loss. Raises ValueError for a wrong setting, or for one without effect,
        naming its key.
        """
        check_choice(f"{TOKEN_KEY}.loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        check_that(
            0 < self.clip_ratio_low < 1 and self.clip_ratio_high > 0,
            f"{TOKEN_KEY}.clip_ratio_low={self.clip_ratio_low}, {TOKEN_KEY}.clip_ratio_high="
            f"{self.clip_ratio_high}: give numbers above 0, the lower one below 1",
        )
        check_that(
            self.clip_ratio_c is None or self.clip_ratio_c > 1 + self.clip_ratio_high,
            f"{TOKEN_KEY}.clip_ratio_c={self.clip_ratio_c}: give more than 1 + clip_ratio_high, "
            "or null for none",
        )
        loss = self.loss()
        check_effects(TOKEN_KEY, self, TokenLoss, TOKEN_OPTIONS, option_names(type(loss)))
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Everything that a loss is built from; there is one rollout correction in a run."""

    rollout_correction: RolloutCorrectionConfig
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    token_loss: TokenLossConfig = field(default_factory=TokenLossConfig)


def with_options(section: Mapping[str, Any], config: type) -> dict[str, Any]:
    """Moves the keys of a section that are no fields of `config` into its `options`.

    {"loss_mode": "my.Loss", "width": 0.1} -> {"loss_mode": "my.Loss", "options": {"width": 0.1}}.
    """
    known = {item.name for item in fields(config)}
    moved = {name: value for name, value in section.items() if name in known}
    options = {name: value for name, value in section.items() if name not in known}
    if options:
        moved["options"] = {**moved.get("options", {}), **options}
    return moved

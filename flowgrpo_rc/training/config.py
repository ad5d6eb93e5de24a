"""Settings of the update and of the advantage estimator."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowgrpo_rc.core.advantages import ESTIMATORS
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.training.ema import EMAConfig
from flowgrpo_rc.training.optim import OptimConfig

OLD_LOG_PROBS = ("auto", "recompute")
REPLAYS = ("any", "aligned")


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages.

    adv_estimator: reward minus the mean of its group, over a standard deviation: `flow_grpo` (that
        of the batch), `grpo` (that of the group); over nothing: `dr_grpo`, and `rloo` (minus the
        mean of the group's others). `gdpo` does as `grpo` with each reward alone, then adds them by
        weight and divides by the standard deviation of the batch.
    norm_adv_by_std_in_grpo: whether to divide by a standard deviation; null takes the estimator's
        own.
    global_std: whether that is the standard deviation of the batch; null takes the estimator's own.
    """

    adv_estimator: str = "flow_grpo"
    norm_adv_by_std_in_grpo: bool | None = None
    global_std: bool | None = None
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    @property
    def norm_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation."""
        own, _ = ESTIMATORS[self.adv_estimator]
        return own if self.norm_adv_by_std_in_grpo is None else self.norm_adv_by_std_in_grpo

    @property
    def norm_by_global_std(self) -> bool:
        """Whether that is the standard deviation of the batch, and not of the group."""
        _, own = ESTIMATORS[self.adv_estimator]
        return own if self.global_std is None else self.global_std

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        if self.adv_estimator not in ESTIMATORS:
            raise ValueError(
                f"algorithm.adv_estimator={self.adv_estimator!r}: allowed are "
                f"{', '.join(ESTIMATORS)}"
            )
        if self.adv_estimator == "gdpo":
            for name in ("norm_adv_by_std_in_grpo", "global_std"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"algorithm.{name}={value} has no effect with "
                        "algorithm.adv_estimator=gdpo: drop it"
                    )
        if self.global_std and not self.norm_by_std:
            raise ValueError(
                "algorithm.global_std=true has no effect where no standard deviation is divided "
                "by: drop it, or set algorithm.norm_adv_by_std_in_grpo=true "
                f"(algorithm.adv_estimator={self.adv_estimator})"
            )
        self.rollout_correction.validate()


@dataclass(kw_only=True)
class ActorConfig:
    """The update.

    ppo_mini_batch_size: prompts of one optimizer step, of all processes together.
    ppo_micro_batch_size_per_gpu: samples per forward and backward of one process; changes no
        result.
    steps_per_forward: SDE steps of a sample per forward and backward of the update; null: all of
        its window. More is faster where memory allows; changes no result.
    ppo_epochs: passes over a step's samples.
    use_kl_loss: add the KL to the base model (the adapter switched off) to the loss.
    kl_loss_coef: what that KL is multiplied by.
    old_log_probs: in decoupled mode, `auto` takes the first mini-batch's own forwards for its old
        policy, where its correction allows that; `recompute` never does.
    replay: `aligned` insists that a micro-batch is what the rollout evaluated together, so that
        equal precisions give a ratio of exactly 1 where a row's last bits depend on the size of its
        batch; `any` lets the sizes differ.
    """

    ppo_mini_batch_size: int = 24
    ppo_micro_batch_size_per_gpu: int = 8
    steps_per_forward: int | None = 1
    ppo_epochs: int = 1
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.04
    old_log_probs: str = "auto"
    replay: str = "any"
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    token_loss: TokenLossConfig = field(default_factory=TokenLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"actor.{name}={getattr(self, name)}: give at least 1")
        if self.steps_per_forward is not None and self.steps_per_forward < 1:
            raise ValueError(
                f"actor.steps_per_forward={self.steps_per_forward}: give at least 1, or null for "
                "all steps of the window"
            )
        if self.use_kl_loss and not self.kl_loss_coef > 0:
            raise ValueError(
                f"actor.kl_loss_coef={self.kl_loss_coef} with actor.use_kl_loss=true: give more "
                "than 0"
            )
        for name, allowed in (("old_log_probs", OLD_LOG_PROBS), ("replay", REPLAYS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"actor.{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}"
                )
        self.diffusion_loss.validate()
        self.token_loss.validate()
        self.optim.validate()
        self.ema.validate()

"""Settings of the update and of the advantage estimator."""

import math
from dataclasses import dataclass, field

from flowgrpo_rc.core.advantages import ESTIMATORS
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.plugins import check_choice, check_least, check_packages

KL_REFERENCES = ("base", "start")
OPTIMIZERS = ("adamw", "adamw_8bit")
# Settings of the update that are 1 or more, or null where the docstring says what null means.
COUNTS = (
    "train_n",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "steps_per_forward",
    "ppo_epochs",
)
LR_SCHEDULERS = ("constant", "linear", "cosine", "polynomial")


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """Further prompts in the places of those that teach nothing.

    enable: drop groups whose rewards are all equal, or of which a sample has no reward.
    max_num_gen_batches: times that a step samples at most, the first included, each time as many
        prompts as groups are missing; the step then trains on the groups that are there.
    """

    enable: bool = False
    max_num_gen_batches: int = 10

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        key = "algorithm.filter_groups.max_num_gen_batches"
        check_least(key, self.max_num_gen_batches, 2)
        if not self.enable and self != FilterGroupsConfig():
            raise ValueError(f"{key} has no effect without algorithm.filter_groups.enable=true")


@dataclass(kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages.

    adv_estimator: reward minus the mean of its group, over a standard deviation: `flow_grpo` (that
        of the batch), `grpo` (that of the group); over nothing: `dr_grpo`, and `rloo` (minus the
        mean of the group's others). `gdpo` does as `grpo` with each reward alone, then adds them by
        weight and divides by the standard deviation of the batch.
    """

    adv_estimator: str = "flow_grpo"
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def validate(self) -> Rules:
        """Returns the rollout correction, parsed. Raises ValueError for a wrong setting."""
        check_choice("algorithm.adv_estimator", self.adv_estimator, ESTIMATORS)
        self.filter_groups.validate()
        return self.rollout_correction.validate()


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer of the LoRA.

    name: adamw, or adamw_8bit, whose moments take a byte each (torchao's, arXiv 2110.02861).
    lr: learning rate.
    betas: decay of the two moments.
    weight_decay: AdamW's, decoupled.
    clip_grad: largest norm of the gradient.
    lr_scheduler: how the learning rate changes until the end of the run.
    lr_warmup_steps: optimizer updates until it is reached.
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 1e-4
    clip_grad: float = 1.0
    lr_scheduler: str = "constant"
    lr_warmup_steps: int = 0

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        check_choice("actor.optim.name", self.name, OPTIMIZERS)
        check_choice("actor.optim.lr_scheduler", self.lr_scheduler, LR_SCHEDULERS)
        if self.name == "adamw_8bit":
            check_packages("actor.optim.name=adamw_8bit", ["torchao"], "quantization")
        for name in ("lr", "clip_grad"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"actor.optim.{name}={getattr(self, name)}: give a number above 0")
        if self.weight_decay < 0 or self.lr_warmup_steps < 0:
            raise ValueError(
                "actor.optim.weight_decay and actor.optim.lr_warmup_steps cannot be negative"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"actor.optim.betas={self.betas}: give two numbers from 0 to below 1")


@dataclass(kw_only=True)
class EMAConfig:
    """The average of the LoRA, which is evaluated and exported.

    enable: without it the last weights are.
    decay: upper bound of min((1 + n) / (10 + n), decay) after n averages.
    update_interval: optimizer updates from one average to the next.
    """

    enable: bool = True
    decay: float = 0.9
    update_interval: int = 8

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"actor.ema.decay={self.decay}: give a number from 0 to below 1")
        check_least("actor.ema.update_interval", self.update_interval, 1)


@dataclass(kw_only=True)
class ActorConfig:
    """The update.

    train_n: at most so many samples of each prompt are trained on, those with the largest
        |advantage| (arXiv 2504.13818); null: all of the rollout.n.
    ppo_mini_batch_size: prompts of one optimizer step, of all processes together.
    ppo_micro_batch_size_per_gpu: samples per forward and backward of one process; changes no
        result.
    steps_per_forward: SDE steps of a sample per forward and backward of the update; null: all of
        its window. More is faster where memory allows; changes no result.
    ppo_epochs: passes over a step's samples.
    use_kl_loss: add the KL to a reference to the loss.
    kl_loss_coef: what that KL is multiplied by.
    kl_reference: `base` is the base model (the adapter switched off), `start` the LoRA of
        model.lora_path as it was.
    """

    train_n: int | None = None
    ppo_mini_batch_size: int = 24
    ppo_micro_batch_size_per_gpu: int = 8
    steps_per_forward: int | None = 1
    ppo_epochs: int = 1
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.04
    kl_reference: str = "base"
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    token_loss: TokenLossConfig = field(default_factory=TokenLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)

    def validate(self) -> None:
        """Raises ValueError for a wrong setting. The sections of losses check themselves."""
        for name in COUNTS:
            check_least(f"actor.{name}", getattr(self, name), 1)
        if self.use_kl_loss and not self.kl_loss_coef > 0:
            raise ValueError(
                f"actor.kl_loss_coef={self.kl_loss_coef} with actor.use_kl_loss=true: give more "
                "than 0"
            )
        check_choice("actor.kl_reference", self.kl_reference, KL_REFERENCES)
        self.optim.validate()
        self.ema.validate()

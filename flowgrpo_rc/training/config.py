"""Settings of the update and of the advantage estimator."""

import math
from dataclasses import dataclass, field

from flowgrpo_rc.core.advantages import ESTIMATORS
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig
from flowgrpo_rc.plugins import check_choice, check_least, check_packages, check_that

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
        message = f"{key} has no effect without algorithm.filter_groups.enable=true"
        check_that(self.enable or self == FilterGroupsConfig(), message)


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
        for name, value in (("lr", self.lr), ("clip_grad", self.clip_grad)):
            positive = 0 < value < math.inf
            check_that(positive, f"actor.optim.{name}={value}: give a number above 0")
        check_least("actor.optim.weight_decay", self.weight_decay, 0)
        check_least("actor.optim.lr_warmup_steps", self.lr_warmup_steps, 0)
        check_that(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"actor.optim.betas={self.betas}: give two numbers from 0 to below 1",
        )


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
        message = f"actor.ema.decay={self.decay}: give a number from 0 to below 1"
        check_that(0 <= self.decay < 1, message)
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
            check_least(f"actor.{name}", vars(self)[name], 1)
        check_that(
            not self.use_kl_loss or self.kl_loss_coef > 0,
            f"actor.kl_loss_coef={self.kl_loss_coef} with actor.use_kl_loss=true: give more than 0",
        )
        check_choice("actor.kl_reference", self.kl_reference, KL_REFERENCES)
        self.optim.validate()
        self.ema.validate()

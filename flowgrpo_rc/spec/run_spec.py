"""Holds what a run is: settings with nothing left open, and the objects that their words name.

`resolve` makes a `RunSpec` at the start of a command. Everything after it reads the objects and the
numbers of the spec, and asks no word a second time.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.config.tree import Config, updates_of_steps
from flowgrpo_rc.correction.config import RolloutCorrectionConfig, Rules
from flowgrpo_rc.correction.recompute import why_recompute
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.losses.base import DIFFUSION_KEY, DiffusionLoss, ForwardLoss, ImageLoss, TokenLoss
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.monitoring.expected_mismatch import relative_size
from flowgrpo_rc.plugins import load_class
from flowgrpo_rc.records.rollout_files import keeps_means
from flowgrpo_rc.rewards.manager import RewardTerms
from flowgrpo_rc.rollout.config import PACKAGE, CacheConfig, RolloutConfig
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.rollout.options.merged_lora import MergedLora


@dataclass(frozen=True)
class Machine:
    """The device of a run, and how many processes share a step."""

    device: torch.device
    num_processes: int = 1


@dataclass(frozen=True, eq=False)
class RunSpec:
    """Everything that was decided about a run.

    Attributes:
      given: the settings as the user gave them.
      settings: the same with what is decided without the engine's class.
      earlier: the settings of the run that goes on in `trainer.output_dir`; None for a new run.
      machine: where it runs.
      loss: what the section of the model's kind names.
      rules: the rollout correction, parsed.
      rewards: the rewards by name, with their weights.
    """

    given: Config
    settings: Config
    earlier: Config | None
    machine: Machine
    loss: ImageLoss | TokenLoss
    rules: Rules
    rewards: RewardTerms

    def with_sections(self, **sections: Any) -> "RunSpec":
        """Returns the spec with other sections, which have the same loss, rules and rewards."""
        return replace(self, settings=replace(self.settings, **sections))

    # What needs the engine's class, whose file may import the libraries of models, is decided when
    # it is first asked for.

    @cached_property
    def engine_class(self) -> type[RolloutEngine[Any]]:
        """Loads the class that `rollout.name` names; ValueError if there is none."""
        try:
            return load_class(PACKAGE, self.settings.rollout.name, RolloutEngine)
        except ValueError as error:
            raise ValueError(f"rollout.name: {error}") from error

    @cached_property
    def config(self) -> Config:
        """Returns the settings with nothing left open: what config.yaml records."""
        settings = self.settings
        rollout = replace(settings.rollout, merge_lora=self._merge_lora())
        correction = replace(settings.algorithm.rollout_correction, centered=self._centered())
        algorithm = replace(settings.algorithm, rollout_correction=correction)
        return replace(settings, rollout=rollout, algorithm=algorithm)

    def _merge_lora(self) -> bool | str | None:
        """Decides `rollout.merge_lora`: what costs no precision, in a resumed run what it had."""
        choice = self.settings.rollout.merge_lora
        if choice is not None:
            return choice
        sharded = resolve_strategy(self.settings.trainer.strategy) == "fsdp2"
        if self.earlier is not None:
            before = self.earlier.rollout.merge_lora
            return False if sharded and before is True else before
        return self._merges_at_no_loss() and not sharded

    def _merges_at_no_loss(self) -> bool:
        """Returns whether the LoRA may be added to the sampling weights, if they are whole.

        Not where the weights are exact and the sum would be rounded to bf16.
        """
        model = self.settings.model
        return (
            MergedLora in self.engine_class.options
            and self.settings.rollout.quantization is model.quantization is None
            and model.dtype != "bf16"
            and model.offload_idle != "layers"
        )

    def _centered(self) -> bool | None:
        """Decides the correction's `centered`: true where the rollout's steps have means."""
        choice = self.settings.algorithm.rollout_correction.centered
        if choice is not None:
            return choice
        if self.earlier is not None:
            return self.earlier.algorithm.rollout_correction.centered
        if self.is_text or self.forward_loss is not None:
            return False
        if self.settings.data.replay_dir is not None:
            return keeps_means(Path(self.settings.data.replay_dir).expanduser())
        return self.engine_class.records_means

    @property
    def is_text(self) -> bool:
        """Tells whether samples are responses of a language model, not images."""
        return self.settings.model.kind == "causal_lm"

    @property
    def forward_loss(self) -> ForwardLoss | None:
        """Returns the loss if it trains on finished samples, and None if on recorded steps."""
        return self.loss if isinstance(self.loss, ForwardLoss) else None

    @property
    def step_loss(self) -> DiffusionLoss:
        """Returns the loss of denoising steps."""
        assert isinstance(self.loss, DiffusionLoss)
        return self.loss

    @property
    def mode(self) -> str | None:
        """Returns `bypass` or `decoupled`; None for a loss without log-probs."""
        if self.forward_loss is not None:
            return None
        return "bypass" if self.settings.algorithm.rollout_correction.bypass_mode else "decoupled"

    @property
    def correction(self) -> RolloutCorrectionConfig:
        """Returns the rollout correction; an unset denominator is that of the model's kind."""
        correction = self.config.algorithm.rollout_correction
        default = "kept" if self.is_text else "all"
        return replace(correction, normalize=correction.normalize or default)

    @property
    def loss_config(self) -> LossConfig:
        """Returns the settings of the loss and of the correction inside it."""
        return LossConfig(
            rollout_correction=self.config.algorithm.rollout_correction,
            diffusion_loss=self.config.actor.diffusion_loss,
            token_loss=self.config.actor.token_loss,
        )

    @property
    def loss_needs_means(self) -> bool:
        """Tells whether the loss compares the means of current steps with the old policy's."""
        return isinstance(self.loss, ImageLoss) and self.loss.needs_means

    @cached_property
    def means_readers(self) -> list[str]:
        """Lists the settings that compare steps with the means that the rollout records."""
        correction = self.config.algorithm.rollout_correction
        mode = self.settings.actor.diffusion_loss.loss_mode
        readers = {
            f"{KEY}.centered=true": correction.centered,
            f"{KEY}.rollout_rs=step_kl": self.rules.needs_means,
            f"{DIFFUSION_KEY}.loss_mode={mode} (in bypass mode)": (
                self.mode == "bypass" and self.loss_needs_means
            ),
        }
        return [setting for setting, reads in readers.items() if reads]

    @property
    def keeps_means(self) -> bool:
        """Tells whether rollouts have to record the means of their steps."""
        return bool(self.means_readers)

    @property
    def clip_ratio(self) -> float | None:
        """Returns the narrower half-width of the PPO band; None if none is fixed."""
        if self.settings.algorithm.rollout_correction.loss_type == "reinforce":
            return None
        if not self.is_text and self.settings.actor.diffusion_loss.auto:
            return None
        band = self.loss.clip_band
        assert not isinstance(band, Tensor)  # it is a number unless it follows the mismatch
        return band

    @property
    def fresh(self) -> bool:
        """Tells whether the weights that are trained made the samples, not older ones."""
        return self.settings.rollout.staleness == 0 and self.settings.data.replay_dir is None

    @cached_property
    def trained_rollout(self) -> RolloutConfig:
        """Returns the settings of the samples that are trained on."""
        return exact_rollout(self.config) if self.config.rollout.redraw else self.config.rollout

    @cached_property
    def expected_mismatch(self) -> float | None:
        """Returns the mismatch that rounding explains, relative to one that can be measured.

        None if older weights made the samples, the engine rounds in a format of its own, or skips
        blocks at recorded steps; see `relative_size`.
        """
        rollout = self.trained_rollout
        model = self.config.model
        if self.forward_loss is not None or not self.fresh:
            return None
        if rollout.engine_kwargs.get("quantization"):
            return None
        if not all(option.rounding_explains(model.dtype) for option in rollout.options()):
            return None
        if model.quantization and not self.engine_class.copies_network:
            return None  # it samples with weights that are not quantized
        return relative_size(rollout.spec().dtype, model.dtype, self.config.trainer.mixed_precision)

    @cached_property
    def why_recompute(self) -> str | None:
        """Says why the first mini-batch's old policy takes forwards of its own; None if not."""
        if self.mode != "decoupled":
            return None
        correction = self.settings.algorithm.rollout_correction
        sees_rows = self.is_text or self.settings.rollout.window()[0] == 1
        return why_recompute(correction, self.rules, sees_rows=sees_rows)

    @property
    def trained_steps(self) -> int:
        """Counts the steps of an image that are trained: SDE steps, or noise levels of it."""
        if self.forward_loss is None:
            return self.settings.rollout.window()[0]
        times = self.forward_loss.times
        return self.settings.rollout.evaluations() if times is None else times

    @property
    def states_per_sample(self) -> int:
        """Counts the states of a sample in a batch: its latents, and means if kept."""
        steps = self.settings.rollout.window()[0]
        return 2 * steps + 1 if self.keeps_means else steps + 1

    @property
    def trained_n(self) -> int | None:
        """Counts the samples of a prompt that are trained on; None for all of them."""
        return trained_n(self.settings)

    @property
    def samples_per_step(self) -> int:
        """Counts the samples of a step on one process, trained on or not."""
        batch_size = self.settings.data.train_batch_size
        return batch_size * self.settings.rollout.n // self.machine.num_processes

    @property
    def trained_per_step(self) -> int:
        """Counts the samples of a step on one process that are trained on."""
        group_size = self.trained_n or self.settings.rollout.n
        return self.settings.data.train_batch_size * group_size // self.machine.num_processes

    @property
    def samples_per_mini_batch(self) -> int:
        """Counts the samples of a mini-batch on one process."""
        return samples_per_mini_batch(self.settings, self.machine.num_processes)

    @property
    def total_updates(self) -> int:
        """Counts the optimizer updates of the whole run."""
        return updates_of_steps(self.settings, self.settings.trainer.total_training_steps)

    @property
    def chunk_size(self) -> int:
        """Counts the samples of one forward while sampling."""
        own_size = self.settings.rollout.micro_batch_size_per_gpu
        return own_size or self.settings.actor.ppo_micro_batch_size_per_gpu

    @property
    def engine_options(self) -> dict[str, object]:
        """Returns what the engine is built with, besides the model and its network."""
        return engine_options(self.config.rollout, self.chunk_size)

    @property
    def gpus_per_worker(self) -> float:
        """Counts the GPUs of a rollout worker, by default all that its engine spans."""
        return gpus_per_worker(self.settings, self.machine.device)


def exact_rollout(config: Config) -> RolloutConfig:
    """Returns the rollout in the trainer's precision, with all blocks."""
    dtype = config.model.dtype
    cache = CacheConfig()
    return replace(config.rollout, dtype=dtype, quantization=None, merge_lora=False, cache=cache)


def trained_n(config: Config) -> int | None:
    """Returns the samples of a prompt that are trained on; None for all of them."""
    chosen = config.actor.train_n
    return None if chosen is None or chosen >= config.rollout.n else chosen


def samples_per_mini_batch(config: Config, num_processes: int) -> int:
    """Returns the samples of a mini-batch on one process."""
    group_size = trained_n(config) or config.rollout.n
    return config.actor.ppo_mini_batch_size * group_size // num_processes


def shares_evenly(config: Config, num_processes: int) -> bool:
    """Returns whether each of so many processes gets whole groups and whole micro-batches."""
    if config.actor.ppo_mini_batch_size % num_processes:
        return False
    samples = samples_per_mini_batch(config, num_processes)
    return samples % config.actor.ppo_micro_batch_size_per_gpu == 0


def gpus_per_worker(config: Config, device: torch.device) -> float:
    """Returns the GPUs of a rollout worker on a device, by default all that its engine spans."""
    chosen = config.rollout.gpus_per_worker
    if chosen is not None or device.type != "cuda":
        return chosen or 0
    return float(config.rollout.engine_kwargs.get("tensor_parallel_size", 1))


def engine_options(rollout: RolloutConfig, chunk_size: int) -> dict[str, object]:
    """Returns what an engine is built with for a rollout, besides the model and its network."""
    options: dict[str, object] = {"dtype": rollout.dtype, "chunk_size": chunk_size}
    applied = [option for option in rollout.options() if option.in_engine]
    if applied:  # only an engine that takes some has a parameter for them
        options["options"] = applied
    return options | rollout.engine_kwargs

"""The configuration tree: each component's own dataclass, where its defaults live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.data.prompts import PromptSampler, read_prompts
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.monitoring.expected_mismatch import relative_size
from flowgrpo_rc.records.run_folder import check_writable
from flowgrpo_rc.rewards.manager import RewardConfig, check_kind, requires_target, validate_rewards
from flowgrpo_rc.rollout.config import EvaluationConfig, PipelineConfig, RolloutConfig
from flowgrpo_rc.training.config import ActorConfig, AlgorithmConfig, TrainerConfig
from flowgrpo_rc.training.old_policy import why_recompute
from flowgrpo_rc.training.sources.replay import replay_files


@dataclass(kw_only=True)
class DataConfig:
    """What is trained on and evaluated on.

    train_files: prompt files (.txt, .jsonl, .parquet) or dataset folders, one or a list of several.
    val_files: those of the held-out prompts.
    train_batch_size: prompts of a step, of all processes together.
    negative_prompt: that of prompts which bring none; needs guidance.
    replay_dir: train on the trajectories that another run saved (its folder) instead of sampling.
    """

    train_files: Any = None
    val_files: Any = None
    train_batch_size: int = 48
    negative_prompt: str = ""
    replay_dir: str | None = None


@dataclass(kw_only=True)
class CompatConfig:
    """How overrides in another system's words are taken.

    ignore: overrides of another system (or sections of them) that have no counterpart here and
        would change what is trained, to go on without.
    """

    ignore: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Config:
    """Everything that a run needs. Keys are those of the command line, `model.path` and so on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)

    def loss(self) -> LossConfig:
        return LossConfig(
            rollout_correction=self.algorithm.rollout_correction,
            diffusion_loss=self.actor.diffusion_loss,
            token_loss=self.actor.token_loss,
        )

    def effective_correction(self) -> RolloutCorrectionConfig:
        """The rollout correction with the denominator that the kind of model has where the user
        does not say.
        """
        correction = self.algorithm.rollout_correction
        own = "kept" if self.model.kind == "causal_lm" else "all"
        return replace(correction, normalize=correction.normalize or own)

    def keep_means(self) -> bool:
        """Whether rollouts have to record the means of their steps."""
        correction = self.algorithm.rollout_correction
        return correction.rules().needs_means or (
            correction.bypass_mode and self.actor.diffusion_loss.needs_means
        )

    def clip_ratio(self) -> float | None:
        """Half the PPO band (its narrower half) on the ratio of a single step; None where the loss
        has another.
        """
        actor = self.actor
        if self.algorithm.rollout_correction.loss_type == "reinforce":
            return None
        if self.model.kind == "causal_lm":
            return actor.token_loss.loss().clip_band
        return actor.diffusion_loss.loss().clip_band

    def fresh(self) -> bool:
        """Whether the weights that are trained have made the samples, and not older ones."""
        return self.rollout.staleness == 0 and self.data.replay_dir is None

    def expected_mismatch(self) -> float | None:
        """`relative_size` of the run's precisions; None for samples of older weights and of an
        engine's own formats.
        """
        rollout = self.rollout
        if not self.fresh() or rollout.engine_kwargs.get("quantization"):
            return None
        return relative_size(rollout.spec().dtype, self.model.dtype, self.trainer.mixed_precision)

    def why_recompute(self) -> str | None:
        """Why decoupled mode recomputes the old policy of the first mini-batch, too; None where it
        does not.
        """
        if self.actor.old_log_probs == "recompute":
            return "actor.old_log_probs=recompute"
        sees_rows = self.model.kind == "causal_lm" or self.rollout.window()[0] == 1
        return why_recompute(self.algorithm.rollout_correction, sees_rows=sees_rows)

    def samples_per_step(self, num_processes: int) -> int:
        """Samples of a step on one process."""
        return self.data.train_batch_size * self.rollout.n // num_processes

    def samples_per_mini_batch(self, num_processes: int) -> int:
        """Samples of a mini-batch on one process."""
        return self.actor.ppo_mini_batch_size * self.rollout.n // num_processes

    def total_updates(self) -> int:
        """Optimizer updates of the whole run."""
        per_step = (
            self.data.train_batch_size // self.actor.ppo_mini_batch_size * self.actor.ppo_epochs
        )
        return self.trainer.total_training_steps * per_step

    def validate(self, num_processes: int = 1) -> None:
        """Raise ValueError for whatever is wrong, before a model is loaded or a file is read in
        full.
        """
        self.model.validate()
        self.rollout.validate()
        self.actor.validate()
        self.algorithm.validate()
        self.trainer.validate()
        for name in ("train_files", "val_files"):
            if not getattr(self.data, name):
                raise ValueError(
                    f"data.{name} is empty: give a prompt file (.txt, .jsonl, .parquet) or a list "
                    "of them"
                )
        validate_rewards(self.reward)
        check_kind(
            self.reward,
            *(("text",) if self.model.kind == "causal_lm" else ("image", "video", "latent")),
        )
        self._validate_sizes(num_processes)
        self._validate_effects()

    def _validate_sizes(self, num_processes: int) -> None:
        prompts, mini = self.data.train_batch_size, self.actor.ppo_mini_batch_size
        if prompts < 1 or prompts % mini:
            raise ValueError(
                f"data.train_batch_size={prompts} prompts are no whole number of mini-batches of "
                f"actor.ppo_mini_batch_size={mini} prompts"
            )
        if mini % num_processes:
            raise ValueError(
                f"actor.ppo_mini_batch_size={mini} prompts cannot be shared evenly by "
                f"{num_processes} processes "
                "(a group of samples stays on one)"
            )
        samples, micro = (
            self.samples_per_mini_batch(num_processes),
            self.actor.ppo_micro_batch_size_per_gpu,
        )
        if samples % micro:
            raise ValueError(
                f"actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {samples} "
                "samples of a mini-batch on "
                f"one process (actor.ppo_mini_batch_size={mini} x rollout.n={self.rollout.n} / "
                f"{num_processes})"
            )
        chunk = self.rollout.micro_batch_size_per_gpu
        if chunk is not None and chunk < 1:
            raise ValueError(f"rollout.micro_batch_size_per_gpu={chunk}: give at least 1, or null")
        if self.actor.replay == "aligned":
            self._validate_alignment(chunk, micro)

    def _validate_alignment(self, chunk: int | None, micro: int) -> None:
        """A micro-batch has to be a batch of the rollout; a mini-batch is a whole number of them in
        any case.
        """
        if self.model.kind == "causal_lm":
            raise ValueError(
                "actor.replay=aligned is for images: text is sampled one token after the other "
                "and evaluated at once "
                "(model.kind=causal_lm); drop it"
            )
        if self.data.replay_dir is not None:
            raise ValueError(
                "actor.replay=aligned: a saved rollout (data.replay_dir) does not tell which "
                "samples were evaluated "
                "together; drop one of them"
            )
        if chunk not in (None, micro):
            raise ValueError(
                "actor.replay=aligned evaluates together what the rollout did, but "
                "rollout.micro_batch_size_per_gpu="
                f"{chunk} and actor.ppo_micro_batch_size_per_gpu={micro}: make them equal (or the "
                "former null); they "
                f"have to divide the samples of a mini-batch on one process"
            )

    def _validate_effects(self) -> None:
        """A setting that would have no effect is an error."""
        self._validate_other_kind()
        self._validate_fp64()
        self._validate_correction()
        scales = [
            s
            for where in (self.rollout.pipeline, self.rollout.val_kwargs)
            for s in _guidance(where)
        ]
        if self.data.negative_prompt and max(scales) <= 1:
            raise ValueError(
                f"data.negative_prompt={self.data.negative_prompt!r} has no effect without "
                "guidance: set "
                "rollout.pipeline.guidance_scale (or true_cfg_scale, where the model has it) "
                "above 1, or drop it"
            )
        for name in ("staleness", "quantization", "compile"):
            value = vars(self.rollout)[name]
            if value and self.data.replay_dir is not None:
                raise ValueError(
                    f"rollout.{name}={value} has no effect with data.replay_dir: drop one of them"
                )
        ema, updates = self.actor.ema, self.total_updates()
        if ema.enable and ema.update_interval > updates:
            raise ValueError(
                f"actor.ema.update_interval={ema.update_interval} exceeds the {updates} updates "
                "of this run, so the "
                "average would stay where it starts: lower it, or set actor.ema.enable=false"
            )

    def _validate_fp64(self) -> None:
        trainer, wanted = self.trainer, "fp64" in (self.model.dtype, self.rollout.dtype)
        if wanted and (trainer.device, trainer.mixed_precision) != ("cpu", "no"):
            raise ValueError(
                f"model.dtype={self.model.dtype} and rollout.dtype={self.rollout.dtype}: fp64 is "
                "for exact comparisons "
                "on a CPU; set trainer.device=cpu and trainer.mixed_precision=no"
            )

    def _validate_correction(self) -> None:
        """What the rollout correction cannot do with the loss and the sampler."""
        correction, actor = self.algorithm.rollout_correction, self.actor
        if correction.bypass_mode and actor.old_log_probs != "auto":
            raise ValueError(
                f"actor.old_log_probs={actor.old_log_probs} has no effect with "
                "algorithm.rollout_correction.bypass_mode"
                "=true, where the old log-probs are the rollout's: drop it, or set "
                "bypass_mode=false"
            )
        if self.model.kind == "causal_lm":
            self._validate_correction_of_text()
        for key, mode, own in (
            ("token_loss", actor.token_loss.loss_mode, TokenLossConfig.loss_mode),
            ("diffusion_loss", actor.diffusion_loss.loss_mode, DiffusionLossConfig.loss_mode),
        ):
            if correction.loss_type == "reinforce" and mode != own:
                raise ValueError(
                    f"actor.{key}.loss_mode={mode} has no effect with "
                    "algorithm.rollout_correction.loss_type=reinforce: drop one of them"
                )
        if self.rollout.algo.log_prob_convention == "peers":
            gaussian = (
                "set rollout.algo.log_prob_convention=gaussian, since that of the peers is "
                "no density"
            )
            if actor.diffusion_loss.loss().needs_density:
                raise ValueError(
                    f"actor.diffusion_loss.loss_mode={actor.diffusion_loss.loss_mode} adds a KL "
                    f"to the log-ratio: {gaussian}"
                )
            if correction.log_prob_scale == "sum":
                raise ValueError(
                    f"algorithm.rollout_correction.log_prob_scale=sum makes a density: {gaussian}"
                )
        if actor.use_kl_loss and correction.bypass_mode and correction.rollout_is_batch_normalize:
            raise ValueError(
                "actor.use_kl_loss=true and "
                "algorithm.rollout_correction.rollout_is_batch_normalize=true cannot be "
                "combined in bypass mode, where the normalisation scales the whole gradient: drop "
                "one of them"
            )

    def _validate_correction_of_text(self) -> None:
        """What only images have: a schedule, Gaussian steps, log-probs that are means."""
        correction = self.algorithm.rollout_correction
        rules = correction.rules()
        refused = (
            (
                correction.bypass_level != "step",
                f"bypass_level={correction.bypass_level} has no effect: whole responses are "
                "corrected; drop it",
            ),
            (
                correction.log_prob_scale != "mean",
                f"log_prob_scale={correction.log_prob_scale} has no effect: a token's log-prob is "
                "no mean; drop it",
            ),
            (
                rules.needs_means,
                "rollout_rs=step_kl compares Gaussian steps, and tokens are none: take token_k3, "
                "the estimate of the "
                "same KL from log-probs",
            ),
            (
                bool(rules.auto),
                "rollout_rs_threshold=auto:k follows the mismatch of each denoising step, and "
                "that of a token depends "
                "on its probability and not on its position: give a number",
            ),
        )
        for holds, message in refused:
            if holds:
                raise ValueError(f"algorithm.rollout_correction.{message} (model.kind=causal_lm)")

    def _validate_other_kind(self) -> None:
        """Settings of images where text is made, and the other way round."""
        default = Config()
        both = (
            ("rollout.pipeline", "diffusion", self.rollout.pipeline, default.rollout.pipeline),
            ("rollout.algo", "diffusion", self.rollout.algo, default.rollout.algo),
            (
                "actor.diffusion_loss",
                "diffusion",
                self.actor.diffusion_loss,
                default.actor.diffusion_loss,
            ),
            (
                "rollout.val_kwargs.num_inference_steps",
                "diffusion",
                *_pair("num_inference_steps", self, default),
            ),
            (
                "rollout.val_kwargs.guidance_scale",
                "diffusion",
                *_pair("guidance_scale", self, default),
            ),
            (
                "rollout.val_kwargs.true_cfg_scale",
                "diffusion",
                *_pair("true_cfg_scale", self, default),
            ),
            ("rollout.val_kwargs.temperature", "causal_lm", *_pair("temperature", self, default)),
            (
                "data.negative_prompt",
                "diffusion",
                self.data.negative_prompt,
                default.data.negative_prompt,
            ),
            ("actor.token_loss", "causal_lm", self.actor.token_loss, default.actor.token_loss),
            (
                "rollout.temperature",
                "causal_lm",
                self.rollout.temperature,
                default.rollout.temperature,
            ),
            (
                "rollout.prompt_length",
                "causal_lm",
                self.rollout.prompt_length,
                default.rollout.prompt_length,
            ),
            (
                "rollout.response_length",
                "causal_lm",
                self.rollout.response_length,
                default.rollout.response_length,
            ),
        )
        for key, kind, value, unset in both:
            if kind != self.model.kind and value != unset:
                raise ValueError(
                    f"{key} is set but has no effect with model.kind={self.model.kind}: drop it"
                )

    def read_prompts(self) -> tuple[PromptSampler, list[Prompt]]:
        """The training sampler and the held-out prompts; ValueError for files that are missing,
        empty or malformed.
        """
        target = requires_target(self.reward)
        data = self.data
        train = read_prompts(
            data.train_files,
            require_target=target,
            negative_text=data.negative_prompt,
            key="data.train_files",
        )
        held_out = read_prompts(
            data.val_files,
            require_target=target,
            negative_text=data.negative_prompt,
            key="data.val_files",
        )
        return PromptSampler(train, data.train_batch_size, self.trainer.seed), held_out

    def check_replay(self, rank: int = 0, num_processes: int = 1) -> None:
        """ValueError if `data.replay_dir` lacks files of this process."""
        if self.data.replay_dir is not None:
            replay_files(Path(self.data.replay_dir).expanduser(), rank, num_processes)

    def check_output(self, num_parameters: int = 0) -> None:
        """ValueError if the output folder cannot be written or its disk has no room for the
        checkpoints.

        A checkpoint holds each of the `num_parameters` of the LoRA four times in fp32 (weight, two
        moments, average), and once more for each step of `rollout.staleness`.
        """
        copies = 4 + self.rollout.staleness
        checkpoints = (self.trainer.max_checkpoints_to_keep + 1) * num_parameters * 4 * copies
        check_writable(Path(self.trainer.output_dir), needed_bytes=64 * 2**20 + checkpoints)


def _guidance(given: PipelineConfig | EvaluationConfig) -> tuple[float, float]:
    return given.guidance_scale, given.true_cfg_scale or 1.0


def _pair(name: str, config: Config, default: Config) -> tuple[object, object]:
    return vars(config.rollout.val_kwargs)[name], vars(default.rollout.val_kwargs)[name]


def stored_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A run's config.yaml with changes, not validated. Keys that are newer than the file take their
    defaults.

    Raises ValueError for a file that is not there, an unknown key or a wrong type.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(Config),
            OmegaConf.load(path),
            OmegaConf.from_dotlist(list(overrides)),
        )
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    return config

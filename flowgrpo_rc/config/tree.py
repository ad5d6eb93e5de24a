"""The configuration tree: the dataclasses of all components together, and numbers that follow from
several of them. Defaults live in the dataclasses; `check_settings` checks them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.recompute import why_recompute
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.losses.config import DECOUPLED_CLIP, DiffusionLossConfig, LossConfig
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.monitoring.expected_mismatch import relative_size
from flowgrpo_rc.plugins import did_you_mean, in_seconds, load_class
from flowgrpo_rc.records.config import TrainerConfig
from flowgrpo_rc.rewards.manager import RewardConfig
from flowgrpo_rc.rollout.config import PACKAGE, CacheConfig, RolloutConfig
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.training.config import ActorConfig, AlgorithmConfig

_CLIP = "clip_ratio"


@dataclass(kw_only=True)
class DataConfig:
    """The prompts of training and of evaluation.

    train_files: prompt files (.txt, .jsonl, .parquet) or dataset folders, one or a list of several.
    val_files: the same for the held-out prompts.
    allow_overlap: let held-out prompts be training prompts, too; their reward is then no held-out
        reward.
    train_batch_size: prompts of a step, of all processes together.
    negative_prompt: for prompts that bring none of their own; needs guidance.
    replay_dir: train on the trajectories that another run saved (its folder) instead of sampling.
    """

    train_files: Any = None
    val_files: Any = None
    allow_overlap: bool = False
    train_batch_size: int = 48
    negative_prompt: str = ""
    replay_dir: str | None = None


@dataclass(kw_only=True)
class CompatConfig:
    """How overrides in the words of another system are read.

    ignore: overrides of another system, or sections of them, that have no counterpart here and
        would change what is trained: the run goes on without them.
    """

    ignore: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Config:
    """Everything that a run needs. Keys are those of the command line, such as `model.path`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)

    def loss(self) -> LossConfig:
        """Returns everything that the loss is built from."""
        return LossConfig(
            rollout_correction=self.algorithm.rollout_correction,
            diffusion_loss=self.actor.diffusion_loss,
            token_loss=self.actor.token_loss,
        )

    def effective_correction(self) -> RolloutCorrectionConfig:
        """Returns the rollout correction; its denominator is that of the model's kind if unset."""
        correction = self.algorithm.rollout_correction
        own = "kept" if self.model.kind == "causal_lm" else "all"
        return replace(correction, normalize=correction.normalize or own)

    def compares_means(self) -> list[str]:
        """Returns the settings that compare steps with the means that the rollout records."""
        correction = self.algorithm.rollout_correction
        loss = self.actor.diffusion_loss
        settings = {
            f"{KEY}.centered=true": correction.centered,
            f"{KEY}.rollout_rs=step_kl": correction.rules().needs_means,
            f"{DIFFUSION_KEY}.loss_mode={loss.loss_mode} (in bypass mode)": (
                correction.corrects_in_loss and loss.needs_means
            ),
        }
        return [setting for setting, compares in settings.items() if compares]

    def keep_means(self) -> bool:
        """Returns whether rollouts have to record the means of their steps."""
        return bool(self.compares_means())

    def trained_steps(self) -> int:
        """Returns how many steps of an image are trained: SDE steps, or noise levels of it."""
        forward = self.actor.diffusion_loss.forward
        if forward is None:
            return self.rollout.window()[0]
        return self.rollout.evaluations() if forward.times is None else forward.times

    def states_per_sample(self) -> int:
        """Returns how many states of a sample a batch holds: its latents, and means if kept."""
        steps = self.rollout.window()[0]
        return 2 * steps + 1 if self.keep_means() else steps + 1

    def clip_ratio(self) -> float | None:
        """Returns the narrower half-width of the PPO band; None for none, or if it follows the
        mismatch.
        """
        if self.algorithm.rollout_correction.loss_type == "reinforce":
            return None
        if self.model.kind == "causal_lm":
            return self.actor.token_loss.loss().clip_band
        if self.actor.diffusion_loss.auto:
            return None
        band = self.actor.diffusion_loss.loss().clip_band
        assert not isinstance(band, Tensor)  # it is a number unless it follows the mismatch
        return band

    def with_fixed_clip(self) -> "Config":
        """Returns the settings with a number for a `clip_ratio=auto:k` that follows no mismatch.

        In decoupled mode the ratio compares two forwards of the training graph, and from saved
        samples the policy moves away with every update. REINFORCE and some losses clip nothing:
        they get the default, which has no effect there.
        """
        section, correction = self.actor.diffusion_loss, self.algorithm.rollout_correction
        if _CLIP not in section.auto or self.model.kind == "causal_lm":
            return self
        number = DECOUPLED_CLIP
        compares = correction.corrects_in_loss and self.data.replay_dir is None
        if correction.loss_type == "reinforce" or not section.reads(_CLIP):
            number = float(DiffusionLossConfig().clip_ratio)
        elif section.step_loss().needs_density:
            return self  # Guard's clip is on another scale: no number here could stand for it
        elif compares and section.bounded_option(self.rollout.algo.log_prob_convention) == _CLIP:
            return self
        section = replace(self.actor.diffusion_loss, clip_ratio=number)
        return replace(self, actor=replace(self.actor, diffusion_loss=section))

    def knows_no_log_probs(self) -> bool:
        """Returns whether the loss trains on finished images, so that there is no mismatch."""
        return self.actor.diffusion_loss.forward is not None

    def fresh(self) -> bool:
        """Returns whether the weights that are trained made the samples, not older ones."""
        return self.rollout.staleness == 0 and self.data.replay_dir is None

    def expected_mismatch(self) -> float | None:
        """Returns the mismatch that rounding explains, relative to one that can be measured.

        None if older weights made the samples, the engine rounds in a format of its own, or skips
        blocks at recorded steps; see `relative_size`.
        """
        rollout = self.trained_rollout()
        if (
            self.knows_no_log_probs()
            or not self.fresh()
            or rollout.engine_kwargs.get("quantization")
        ):
            return None
        if rollout.merge_lora and self.model.dtype == "bf16":
            return None  # the sum rounds weights that were exact
        engine: type[RolloutEngine[Any]] = load_class(PACKAGE, rollout.name, RolloutEngine)
        if self.model.quantization and not engine.copies_network:
            return None  # it samples with weights that are not quantized
        if rollout.cache.every > 1 and rollout.cache.window:
            return None
        return relative_size(rollout.spec().dtype, self.model.dtype, self.trainer.mixed_precision)

    def why_recompute(self) -> str | None:
        """Returns why the old policy of the first mini-batch takes forwards of its own; None if
        not.
        """
        if self.algorithm.rollout_correction.corrects_in_loss or self.knows_no_log_probs():
            return None
        if self.actor.old_log_probs == "recompute":
            return "actor.old_log_probs=recompute"
        sees_rows = self.model.kind == "causal_lm" or self.rollout.window()[0] == 1
        return why_recompute(self.algorithm.rollout_correction, sees_rows=sees_rows)

    def gpus_per_worker(self, device_type: str) -> float:
        """Returns the GPUs of a rollout worker, by default all that its engine spans on `cuda`."""
        given = self.rollout.gpus_per_worker
        if given is not None or device_type != "cuda":
            return given or 0
        return float(self.rollout.engine_kwargs.get("tensor_parallel_size", 1))

    def samples_per_step(self, num_processes: int) -> int:
        """Returns the samples of a step on one process, those that are not trained on included."""
        return self.data.train_batch_size * self.rollout.n // num_processes

    def samples_per_mini_batch(self, num_processes: int) -> int:
        """Returns the samples of a mini-batch on one process."""
        each = self.trained_n() or self.rollout.n
        return self.actor.ppo_mini_batch_size * each // num_processes

    def trained_per_step(self, num_processes: int) -> int:
        """Returns the samples of a step on one process that are trained on."""
        each = self.trained_n() or self.rollout.n
        return self.data.train_batch_size * each // num_processes

    def trained_n(self) -> int | None:
        """Returns the samples of a prompt that are trained on; None for all of them."""
        chosen = self.actor.train_n
        return None if chosen is None or chosen >= self.rollout.n else chosen

    def trained_rollout(self) -> RolloutConfig:
        """Returns the settings of the samples that are trained on."""
        if not self.rollout.redraw:
            return self.rollout
        exact = replace(self.rollout, dtype=self.model.dtype, quantization=None, merge_lora=False)
        return replace(exact, cache=CacheConfig())

    def shares_evenly(self, num_processes: int) -> bool:
        """Returns whether each of so many processes gets whole groups and whole micro-batches."""
        if self.actor.ppo_mini_batch_size % num_processes:
            return False
        samples = self.samples_per_mini_batch(num_processes)
        return samples % self.actor.ppo_micro_batch_size_per_gpu == 0

    def total_updates(self) -> int:
        """Returns the optimizer updates of the whole run."""
        return updates_of_steps(self, self.trainer.total_training_steps)


# Sections whose keys the user names: rewards, options of an engine, options of a loss.
FREE_FORM = (
    *("reward.terms.", "rollout.engine_kwargs.", "model.chat_template_kwargs."),
    *(f"{DIFFUSION_KEY}.", f"{TOKEN_KEY}."),
)


def replaces(key: str, value: Any) -> bool:
    """Returns whether an override is a mapping that replaces what its key held, not joins it.

    A section with keys of this project keeps those that the mapping leaves out.
    """
    is_section = key in (DIFFUSION_KEY, TOKEN_KEY)
    return isinstance(value, Mapping) and f"{key}.".startswith(FREE_FORM) and not is_section


@cache
def typed_tree() -> DictConfig:
    """The tree of the dataclasses with their defaults; built once, and changed by nobody."""
    return OmegaConf.structured(Config)


@cache
def known_keys() -> frozenset[str]:
    """Returns the keys of this project, sections included."""
    return frozenset(_keys(OmegaConf.to_container(typed_tree())))


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name, below in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(below, f"{prefix}{name}.")


def updates_of_steps(config: Any, steps: int) -> int:
    """Returns the optimizer updates of the first steps of a run."""
    mini_batches = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    return int(steps * mini_batches * config.actor.ppo_epochs)


def register_asset_resolver() -> None:
    """Lets `${asset:NAME}` stand for the path of a bundled folder or file."""
    OmegaConf.register_new_resolver("asset", lambda name: str(assets.path(name)), replace=True)


# Keys that earlier versions had, and the only value with which such a run can go on.
GONE = {
    "rollout.reuse": 0,
    "rollout.algo.sde_window_stride": 1,
    "actor.optim.max_nonfinite_updates": 5,
    "actor.optim.eps": 1e-8,
    "rollout.val_kwargs.seed": 42,
    "rollout.calculate_log_probs": True,
    "algorithm.norm_adv_by_std_in_grpo": None,
    "algorithm.global_std": None,
    "data.max_image_pixels": 4096 * 4096,
}


def stored_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a run's config.yaml, without checking it. Keys newer than the file take their defaults.

    Bundled files are those of this installation, whichever one has written the run's folder.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    register_asset_resolver()
    tree = plain_yaml(path)
    # Every version writes all sections, so a file without one was cut at the end of a line.
    absent = [section.name for section in fields(Config) if tree.get(section.name) is None]
    if absent:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(absent)}")
    blamed = str(path)
    try:
        stored: Any = OmegaConf.to_container(OmegaConf.create(tree))
        for key, value in GONE.items():
            section, _, name = key.rpartition(".")
            place = reduce(lambda tree, part: tree.get(part) or {}, section.split("."), stored)
            if name in place and place[name] == value:
                del place[name]
        defaults = OmegaConf.structured(Config)
        defaults.reward.terms = {}  # the file names all rewards of the run
        merged = OmegaConf.merge(defaults, assets.with_lost_references(stored))
        for override in overrides:
            key = override.partition("=")[0]
            hint = "" if key in known_keys() else did_you_mean(key, sorted(known_keys()))
            blamed = f"{override}{hint}"
            given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
            chosen = reduce(lambda tree, part: tree[part], key.split("."), given)
            chosen = in_seconds(key, chosen)
            OmegaConf.update(merged, key, chosen, merge=not replaces(key, chosen))
        blamed = str(path)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{blamed}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    return config

"""The configuration tree: the dataclasses of all components together. Defaults live in them; what
follows from several of them is decided in `spec/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowgrpo_rc import assets
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.plugins import did_you_mean, in_seconds
from flowgrpo_rc.records.config import TrainerConfig
from flowgrpo_rc.rewards.manager import RewardConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.training.config import ActorConfig, AlgorithmConfig


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


# Sections whose keys the user names: rewards, options of an engine, options of a loss.
FREE_FORM = (
    *("reward.terms.", "rollout.engine_kwargs.", "model.chat_template_kwargs."),
    *(f"{DIFFUSION_KEY}.", f"{TOKEN_KEY}."),
)


def is_free_form(key: str) -> bool:
    """Returns whether a key is one of these sections, or below one."""
    return f"{key}.".startswith(FREE_FORM)


def replaces(key: str, value: object) -> bool:
    """Returns whether an override is a mapping that replaces what its key held, not joins it.

    A section with keys of this project keeps those that the mapping leaves out.
    """
    is_section = key in (DIFFUSION_KEY, TOKEN_KEY)
    return isinstance(value, Mapping) and is_free_form(key) and not is_section


@cache
def typed_tree() -> DictConfig:
    """The tree of the dataclasses with their defaults; built once, and changed by nobody."""
    return OmegaConf.structured(Config)


@cache
def known_keys() -> frozenset[str]:
    """Returns the keys of this project, sections included."""
    return frozenset(_keys(OmegaConf.to_container(typed_tree())))


def _keys(node: object, prefix: str = "") -> Iterator[str]:
    for name, below in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(below, f"{prefix}{name}.")


def updates_of_steps(config: Config | DictConfig, steps: int) -> int:
    """Returns the optimizer updates of the first steps of a run."""
    mini_batches = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    return int(steps * mini_batches * config.actor.ppo_epochs)


def register_asset_resolver() -> None:
    """Lets `${asset:NAME}` stand for the path of a bundled folder or file."""
    OmegaConf.register_new_resolver("asset", lambda name: str(assets.path(name)), replace=True)


def stored_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a run's config.yaml, without checking it. Keys that it lacks take their defaults."""
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
        defaults = OmegaConf.structured(Config)
        defaults.reward.terms = {}  # the file names all rewards of the run
        merged = OmegaConf.merge(defaults, stored)
        for override in overrides:
            key = override.partition("=")[0]
            hint = "" if key in known_keys() else did_you_mean(key, sorted(known_keys()))
            blamed = f"{override}{hint}"
            written: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
            value = reduce(lambda tree, name: tree[name], key.split("."), written)
            value = in_seconds(key, value)
            OmegaConf.update(merged, key, value, merge=not replaces(key, value))
        blamed = str(path)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{blamed}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    return config

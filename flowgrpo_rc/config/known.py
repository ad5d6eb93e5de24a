"""The keys of the configuration, and what a message says about one that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from functools import cache

from omegaconf import DictConfig, ListConfig, OmegaConf

from flowgrpo_rc.config.setting import PREFIX
from flowgrpo_rc.config.translate import foreign_keys
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY

# Sections whose keys the user names: rewards, options of an engine, options of a loss.
FREE_FORM = ("reward.terms.", "rollout.engine_kwargs.", f"{DIFFUSION_KEY}.", f"{TOKEN_KEY}.")
# The rollout correction and the place where verl-omni has it: one object, whichever name is used.
CORRECTION = ("algorithm.rollout_correction", "actor.rollout_correction")


@cache
def typed_tree() -> DictConfig:
    """The tree of the dataclasses with their defaults; built once, and changed by nobody."""
    return OmegaConf.structured(Config)


@cache
def known_keys() -> frozenset[str]:
    """Returns the keys of this project, sections included."""
    return frozenset(_keys(typed_tree()))


def is_correction(key: str) -> bool:
    """Returns whether a key is the rollout correction, which checks its own keys, or in it."""
    return key in CORRECTION or key.startswith(tuple(f"{path}." for path in CORRECTION))


def check_keys(keys: Iterable[str], groups: Collection[str] = ()) -> None:
    """Raises ValueError for a key that is neither in the tree nor a group."""
    known = known_keys()
    for key in keys:
        if key.startswith(("hydra", *FREE_FORM)) or key in known or key in groups:
            continue
        theirs = [name.removeprefix(PREFIX) for name in foreign_keys()]
        near = [
            *difflib.get_close_matches(key, known, n=1, cutoff=0.7),
            *difflib.get_close_matches(key, {*known, *theirs}, n=1, cutoff=0.5),
        ]
        leaf = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        hint = (
            f"did you mean {(near or leaf)[0]}?" if near or leaf else "see --cfg job for all keys"
        )
        raise ValueError(f"unknown key {key}: {hint}")


def _keys(node: DictConfig | ListConfig, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, DictConfig):
        return
    for name in node:
        key = f"{prefix}{name!s}"
        yield key
        yield from _keys(node._get_node(name), f"{key}.")  # type: ignore[arg-type]

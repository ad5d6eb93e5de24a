"""Hydra composition: a YAML of `configs/` plus overrides -> a checked `Config`. The only file that imports hydra."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowgrpo_rc import assets
from flowgrpo_rc.config import Config

DEFAULT_CONFIG = "tiny_ocr"
_FREE_FORM = "reward.terms."


def config_folder() -> Path:
    """`configs/`: inside the package in a wheel, beside it in a source tree."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose_config(
    overrides: Sequence[str], *, config_name: str = DEFAULT_CONFIG, config_dir: str | None = None
) -> DictConfig:
    """The composed configuration, typed but not validated. ValueError names the key, the value and what is allowed."""
    OmegaConf.register_new_resolver("asset", lambda name: str(assets.path(name)), replace=True)
    ConfigStore.instance().store(name="schema", node=Config)
    folders = [config_folder()]
    overrides = [_free_form(override) for override in overrides]
    if config_dir is not None:
        folders.append(Path(config_dir).expanduser().resolve())
        if not folders[-1].is_dir():
            raise ValueError(f"--config-dir {config_dir}: there is no such folder")
        overrides.append(f"hydra.searchpath=[file://{folders[-1]}]")
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if config_name.removesuffix(".yaml") not in names:
        raise ValueError(f"--config-name {config_name}: there is no such file; there are {', '.join(names)}")
    _check_keys(overrides, {path.name for folder in folders for path in folder.iterdir() if path.is_dir()})
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(config_folder().resolve()), version_base="1.3"):
        try:
            return compose(config_name=config_name, overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_first_cause(error)) from error


def to_config(composed: DictConfig) -> Config:
    """The dataclass tree, validated for the number of processes that the launcher announces."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_first_cause(error)) from error
    assert isinstance(config, Config)
    config.validate(int(os.environ.get("WORLD_SIZE", "1")))
    return config


def _free_form(override: str) -> str:
    """Rewards are named by the user, so their keys may be new: no `+` needed."""
    return f"++{override}" if override.startswith((_FREE_FORM, "reward.terms=")) else override


def _check_keys(overrides: Iterable[str], groups: set[str]) -> None:
    """ValueError for a key that is neither in the tree nor a folder of configuration files (a Hydra group)."""
    known = set(_keys(OmegaConf.structured(Config)))
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ValueError(f"cannot read the overrides: {_first_cause(error)}") from error
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override():
            raise ValueError(
                f"{override.input_line}: a value with commas must be a list, {key}=[a,b], or quoted twice, "
                f"{key}='\"a,b\"'"
            )
        if key.startswith(("hydra", _FREE_FORM)) or key in known or key in groups:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        leaf = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        hint = f"did you mean {(near or leaf)[0]}?" if near or leaf else "see --cfg job for all keys"
        raise ValueError(f"unknown key {key}: {hint}")


def _keys(node: DictConfig | ListConfig, prefix: str = "") -> Iterable[str]:
    if not isinstance(node, DictConfig):
        return
    for name in node:
        key = f"{prefix}{name!s}"
        yield key
        yield from _keys(node._get_node(name), f"{key}.")  # type: ignore[arg-type]


def _first_cause(error: BaseException) -> str:
    """The message at the root of a chain of hydra errors, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    key = getattr(error, "full_key", None)
    text = str(error).split("\n")[0]
    return f"{key}: {text}" if key and key not in text else text

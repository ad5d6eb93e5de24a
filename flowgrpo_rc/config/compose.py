"""Composes a configuration: a file of `configs/` and overrides become a `Config`.

The only file that imports hydra.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowgrpo_rc.config.config_files import (
    CORRECTION,
    ConfigFile,
    ConfigFiles,
    check_keys,
    is_correction,
    merged,
    no_file,
    section_of,
    translated_name,
)
from flowgrpo_rc.config.names import DEFAULT_CONFIG, EXPERIMENT, OTHER_CONFIG
from flowgrpo_rc.config.names import config_folder as config_folder
from flowgrpo_rc.config.rows import TRANSLATED, Row, check, resolved
from flowgrpo_rc.config.translate import Setting, is_whole_command, translate
from flowgrpo_rc.config.translate_correction import rollout_correction
from flowgrpo_rc.config.tree import (
    Config,
    is_free_form,
    register_asset_resolver,
    replaces,
    typed_tree,
    updates_of_steps,
)
from flowgrpo_rc.losses.config import DiffusionLossConfig, TokenLossConfig, with_options
from flowgrpo_rc.plugins import in_seconds
from flowgrpo_rc.redaction import redact
from flowgrpo_rc.training.config import ActorConfig, AlgorithmConfig

_START = "start"


@dataclass(kw_only=True)
class _Algorithm(AlgorithmConfig):
    rollout_correction: Any = field(default_factory=dict)


@dataclass(kw_only=True)
class _Actor(ActorConfig):
    rollout_correction: Any = field(default_factory=dict)
    diffusion_loss: Any = field(default_factory=dict)
    token_loss: Any = field(default_factory=dict)


@dataclass(kw_only=True)
class _Schema(Config):
    """`Config` before translation: a file may write the correction in the words of any document."""

    algorithm: _Algorithm = field(default_factory=_Algorithm)
    actor: _Actor = field(default_factory=_Actor)


class Composition(NamedTuple):
    """A typed configuration, of which only the rollout correction is checked, and what became of
    settings in the words of another system.
    """

    config: DictConfig
    rows: Sequence[Row]

    def check(self) -> None:
        """Raises ValueError for settings that have no counterpart and change what is trained."""
        check(self.rows, self.config.compat.ignore)


def compose_config(
    overrides: Sequence[str], *, config_name: str | None = None, config_dir: str | None = None
) -> DictConfig:
    """Composes as `compose_all` does, and refuses settings without counterpart as a run does."""
    composed = compose_all(overrides, config_name=config_name, config_dir=config_dir)
    composed.check()
    return composed.config


def compose_all(
    overrides: Sequence[str], *, config_name: str | None = None, config_dir: str | None = None
) -> Composition:
    """Composes a file and overrides, which may be in this project's words or in verl-omni's.

    Without `config_name` the file is that of the bundled model, `verl_omni` for a whole command
    line of verl-omni, and experiment/NAME for `+experiment=NAME`. `config_dir` is a further folder.
    """
    _register_resolvers()
    folders = _folders(config_dir)
    groups = _groups(folders)
    settings = _parse(overrides)
    _check_groups(settings, groups)
    config_name = _experiment(config_name, settings)
    settings = [setting for setting in settings if setting.key != EXPERIMENT]
    values = {setting.key: setting.value for setting in settings}
    is_command = config_name is None and is_whole_command(values)
    files = ConfigFiles(folders, values)
    file = files.read(config_name or (OTHER_CONFIG if is_command else DEFAULT_CONFIG))
    rows = [row for parent in file.all_files() for row in parent.rows]
    in_files = {key: value for parent in file.all_files() for key, value in parent.given.items()}
    translation = translate(settings, beside=in_files, whole=is_command or file.is_whole)
    parsed = _parse(translation.lines)
    correction = _correction_of(setting for setting in parsed if is_correction(setting.key))
    others = [setting for setting in parsed if not is_correction(setting.key)]
    check_keys({s.key: s.value for s in others if not s.line.startswith("~")}, groups)
    # Hydra would join a mapping to what it replaces, so it gets neither that nor what refines it.
    whole = [replaces(setting.key, setting.value) for setting in others]
    place = whole.index(True) if True in whole else len(whole)
    later = [setting for setting in others[place:] if is_free_form(setting.key)]
    earlier = [setting.line for setting in others if setting not in later]
    # New keys need no `+` where the user names them.
    lines = [f"++{line}" if is_free_form(line.partition("=")[0]) else line for line in earlier]
    composed = _compose(file, lines, files.homes[file.name], folders)
    for setting in later:
        OmegaConf.update(composed, setting.key, setting.value, merge=False, force_add=True)
    config, notes = _translated(composed, file, correction)
    # A note is such as `use_tis -> rollout_is=token`.
    translated = [Row(TRANSLATED, *note.partition(" -> ")[::2]) for note in notes]
    rows += [*translation.rows, *translated]
    if is_command:
        rows.append(Row(TRANSLATED, "(what is not given)", f"configs/{OTHER_CONFIG}.yaml"))
    return Composition(config, resolved(rows, config.compat.ignore))


def _compose(
    file: ConfigFile, lines: Sequence[str], folder: Path, folders: Sequence[Path]
) -> DictConfig:
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=_Schema)
    for changed in file.all_files():
        if changed.is_changed:
            group, _, name = translated_name(changed.name).rpartition("/")
            node = {"defaults": list(changed.defaults), **changed.tree}
            store.store(name=name, group=group or None, node=node)
    # Hydra looks for a group of the command line beside the file that it starts from, so that one
    # is at the top.
    start = translated_name(file.name) if file.is_changed else file.name
    store.store(name=_START, node={"defaults": [f"{start}@_global_", "_self_"]})
    home = folder.resolve()
    further = [
        f"hydra.searchpath=[file://{other.resolve()}]"
        for other in folders
        if other.resolve() != home
    ]
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(home), version_base="1.3"):
        try:
            return compose(config_name=_START, overrides=[*lines, *further])
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_first_cause(error)) from error


def _experiment(config_name: str | None, settings: Iterable[Setting]) -> str | None:
    """Returns the file to start from: `config_name`, or the one that `experiment=NAME` names."""
    chosen = [setting for setting in settings if setting.key == EXPERIMENT]
    words = [] if config_name is None else [f"--config-name {config_name}"]
    words += [setting.line for setting in chosen]
    if len(words) > 1:
        raise ValueError(f"{' and '.join(words)}: each is a whole configuration, give one of them")
    return f"{EXPERIMENT}/{chosen[0].value}" if chosen else config_name


def _groups(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Returns the files in each Hydra group, which is a folder of configuration files."""
    groups: dict[str, list[Path]] = {}
    for path in (path for folder in folders for path in folder.iterdir() if path.is_dir()):
        groups.setdefault(path.name, []).extend(path.glob("*.yaml"))
    return groups


def _folders(config_dir: str | None) -> list[Path]:
    folders = [config_folder()]
    if config_dir is not None:
        folders.append(Path(config_dir).expanduser().resolve())
        if not folders[-1].is_dir():
            raise ValueError(f"--config-dir {config_dir}: there is no such folder")
    return folders


def _register_resolvers() -> None:
    """Defines what files may write in `${...}`: bundled files, and numbers of optimizer updates."""
    register_asset_resolver()
    resolvers: dict[str, Callable[..., object]] = {
        "updates_of_steps": lambda steps, _root_: updates_of_steps(_root_, steps),
        "updates_of_ratio": lambda ratio, _root_: updates_of_steps(
            _root_, round(ratio * _root_.trainer.total_training_steps)
        ),
        "per_update": lambda rate, _root_: rate / updates_of_steps(_root_, 1),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _translated(
    composed: DictConfig, file: ConfigFile, correction: dict[str, object]
) -> tuple[DictConfig, list[str]]:
    """Returns the typed tree, its rollout correction in this project's words, and notes on that."""
    tree: Any = OmegaConf.to_container(composed)
    in_file = merged(
        (path, section_of(tree[path.split(".")[0]].pop("rollout_correction")))
        for path in CORRECTION
    )
    for name, section in (("diffusion_loss", DiffusionLossConfig), ("token_loss", TokenLossConfig)):
        if isinstance(tree["actor"][name], dict):
            tree["actor"][name] = with_options(tree["actor"][name], section)
    layers = file.corrections()
    known = {key: value for layer in layers for key, value in layer.items()}
    from_groups = {
        key: value for key, value in in_file.items() if key not in known or known[key] != value
    }
    chosen = layers[-1:] if file.is_block and layers[-1] else layers  # a block's own is a whole one
    config, notes = rollout_correction([*chosen, from_groups, correction])
    try:
        typed = OmegaConf.merge(typed_tree(), tree)
        typed.reward.terms = tree["reward"]["terms"]  # without those of the dataclass
        typed.algorithm.rollout_correction = config
    except OmegaConfBaseException as error:
        raise ValueError(_first_cause(error)) from error
    assert isinstance(typed, DictConfig)
    return typed, notes


def _correction_of(settings: Iterable[Setting]) -> dict[str, object]:
    """Returns the settings of the rollout correction on the command line.

    A name alone, as in `algorithm.rollout_correction=NAME`, is the name of a preset.
    """
    sections = []
    for line, key, value, text in settings:
        if isinstance(value, int | float) and "_" in text:
            raise ValueError(
                f"{line}: Hydra reads the number {value}; quote a pair twice, '\"{text}\"'"
            )
        path = next(path for path in CORRECTION if key.startswith(path))
        name = key[len(path) + 1 :]
        sections.append((path, {name: value} if name else section_of(value)))
    return merged(sections)


def to_config(composed: DictConfig) -> Config:
    """Returns the dataclasses of a composed configuration. ValueError for a missing value."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_first_cause(error)) from error
    assert isinstance(config, Config)
    return config


def as_yaml(composed: DictConfig) -> str:
    """Returns a composed configuration as YAML, without passwords, keys and tokens."""
    shown = redact(OmegaConf.to_container(composed, resolve=True))
    return OmegaConf.to_yaml(OmegaConf.create(shown))


def _parse(overrides: Sequence[str]) -> list[Setting]:
    parser = OverridesParser.create()
    settings = []
    for word in overrides:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            key = word.partition("=")[0]
            quote = re.search("[\u2018-\u201f]", word)
            raise ValueError(
                f"{word!r} is no setting: {f'{quote[0]} is no quote here; ' if quote else ''}"
                "write key=value, close each bracket and quote, and put a text with signs into "
                f"quotes of its own, '{key}=\"a text\"'"
            ) from error
        line, key = str(override.input_line), override.key_or_group
        if override.is_sweep_override():
            raise ValueError(
                f"{line}: a value with commas must be a list, {key}=[a,b], or quoted twice, "
                f"{key}='\"a,b\"'"
            )
        written = None if override.is_delete() else _plain(override.value())
        value = in_seconds(key, written)
        if value != written and not isinstance(value, Mapping):
            line = f"{line.partition('=')[0]}={value}"
        settings.append(Setting(line, key, value, line.partition("=")[2]))
    return settings


def _plain(value: object) -> object:
    """Returns a parsed value without Hydra's own types."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _check_groups(settings: Iterable[Setting], groups: Mapping[str, Sequence[Path]]) -> None:
    """Raises ValueError for a name that its Hydra group does not have."""
    for line, key, value, _ in settings:
        names = {file.stem: file.parent for file in groups.get(key, ())}
        if names and isinstance(value, str) and value not in names:
            raise ValueError(f"{line}: {no_file(value, names, {*names.values()})}")


def _first_cause(error: BaseException) -> str:
    """The message at the root of a chain of hydra errors, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).split("\n")
    text = lines[0]
    key = getattr(error, "full_key", None)
    if text.endswith("raised while composing config:"):
        # Hydra says which file it is in, and quotes OmegaConf's message below.
        where = text.partition(":")[0].replace("_translated_", "")
        text = f"{where}: {lines[1]}"
        keys = [line.partition("full_key: ")[2] for line in lines if "full_key: " in line]
        key = keys[0] if keys else None
    else:
        text = " ".join([text, *(line for line in lines[1:] if line.startswith("To append"))])
    # Of several types: OmegaConf names them, and not the words that are allowed.
    text = re.sub(
        r"is incompatible with type hint .*Union.*",
        "is not one of its values, which the page of all keys lists",
        text,
    )
    if text.endswith("is not Optional"):
        return f"{key}=null: give a value, or drop it; this key has no null"
    if text.endswith("is not a ListConfig, list or tuple."):
        return f"{key}: give a list, {key}=[...]"
    return f"{key}: {text}" if key and key not in text else text

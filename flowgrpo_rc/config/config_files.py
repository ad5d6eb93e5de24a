"""Finds the configuration files that a run builds on, and reads them in the words of any document.

Files of this project are left to Hydra. A file of the user may hold another system's keys, such as
`actor_rollout_ref.rollout.n`, and may be a block alone, without `defaults`.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from flowgrpo_rc.config.foreign import PREFIX, foreign, mapping_of, own_key
from flowgrpo_rc.config.names import DEFAULT_CONFIG, EXPERIMENT, OTHER_CONFIG
from flowgrpo_rc.config.rows import TRANSLATED, Row
from flowgrpo_rc.config.translate import is_whole_command, translate_tree, values_of
from flowgrpo_rc.config.tree import FREE_FORM, known_keys, typed_tree
from flowgrpo_rc.plugins import did_you_mean, in_seconds

# The rollout correction and the place where verl-omni has it: one object, whichever name is used.
CORRECTION = ("algorithm.rollout_correction", "actor.rollout_correction")
_SELF = "_self_"
_NO_GROUPS = {"accelerate", "architectures"}  # folders of configs/ for other programs and plans


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A configuration file."""

    name: str  # `tiny_ocr`, or `experiment/NAME`
    tree: Mapping[str, Any]  # in this project's naming, without `defaults`
    defaults: Sequence[object]  # what it builds on, in Hydra's grammar
    parents: "Sequence[ConfigFile | None]"  # the files among them; None stands for the file itself
    given: Mapping[str, object] = field(
        default_factory=dict
    )  # keys as a file of the user says them
    rows: Sequence[Row] = field(default_factory=list)
    # Whether it builds on what it does not name. Its rollout correction is then a whole one, in
    # which the documents' defaults hold, not those of that file.
    is_block: bool = False
    is_whole: bool = False  # whether it is a whole configuration of verl-omni
    is_changed: bool = False  # whether Hydra takes it from here, and not from the disk

    def all_files(self) -> "Iterator[ConfigFile]":
        """Yields this file and those that it builds on."""
        for parent in self.parents:
            if parent is not None:
                yield from parent.all_files()
        yield self

    def corrections(self) -> list[dict[str, object]]:
        """Returns the rollout corrections of this file and those that it builds on, one by one.

        Hydra's merged mapping no longer tells the preset of one file from the keys of another.
        """
        roots = ((path, self.tree.get(path.split(".")[0]) or {}) for path in CORRECTION)
        sections = ((path, root.get("rollout_correction", {})) for path, root in roots)
        correction = merged((path, section_of(section)) for path, section in sections)
        layers: list[dict[str, object]] = []
        for parent in self.parents:
            layers += [correction] if parent is None else parent.corrections()
        return layers


class ConfigFiles:
    """The configuration files in some folders."""

    def __init__(self, folders: Sequence[Path], beside: Mapping[str, object]) -> None:
        self._own = folders[0]
        self._folders = folders
        self._beside = beside
        self.homes = {
            path.relative_to(folder).with_suffix("").as_posix(): folder
            for folder in folders
            for pattern in ("*.yaml", f"{EXPERIMENT}/*.yaml", "correction/*.yaml")
            for path in folder.glob(pattern)
        }

    def read(self, name: str) -> ConfigFile:
        """Reads the file that a run starts from, and those that it builds on.

        One without `defaults` builds on the bundled job, or on the defaults of verl-omni if it is a
        whole configuration of verl-omni.
        """
        name = name.removesuffix(".yaml")
        if name not in self.homes:
            raise ValueError(f"--config-name {name}: {no_file(name, self.homes, self._folders)}")
        return self._read(name, is_start=True)

    def _read(self, name: str, *, is_start: bool) -> ConfigFile:
        path = self.homes[name] / f"{name}.yaml"
        tree: dict[str, Any] = mapping_of(path, str(path))
        defaults = tree.pop("defaults", None)
        if self.homes[name] == self._own:
            return self._with_parents(name, tree, defaults or [_SELF])
        try:
            tree = {section: in_seconds(section, value) for section, value in tree.items()}
            values = values_of(tree)
            tree, rows = translate_tree(tree, {**values, **self._beside})
            check_keys(values_of(tree))
            _join_corrections(tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        is_block = defaults is None and is_start
        whole = is_block and is_whole_command({*values, *self._beside})
        if is_block:
            base = OTHER_CONFIG if whole else DEFAULT_CONFIG
            defaults = [f"/{base}", _SELF]
            rows.append(Row(TRANSLATED, "(what is not given)", f"configs/{base}.yaml"))
            if any(is_correction(key) for key in values_of(tree)):
                what = "(what is not given of rollout_correction)"
                rows.append(Row(TRANSLATED, what, "its own defaults, such as bypass_mode=false"))
        file = self._with_parents(name, tree, defaults or [_SELF])
        return replace(
            file, given=values, rows=rows, is_block=is_block, is_whole=whole, is_changed=True
        )

    def _with_parents(
        self, name: str, tree: Mapping[str, object], defaults: list[object]
    ) -> ConfigFile:
        """Reads the files that a file builds on, and puts changed ones in their place."""
        if _SELF not in defaults:
            defaults = [*defaults, _SELF]
        parents = [(entry, self._parent(name, entry)) for entry in defaults]
        entries = [
            f"/{translated_name(parent.name)}@_global_" if parent and parent.is_changed else entry
            for entry, parent in parents
        ]
        return ConfigFile(
            name=name,
            tree=tree,
            defaults=entries,
            parents=[parent for entry, parent in parents if parent or entry == _SELF],
            is_changed=entries != defaults,
        )

    def _parent(self, name: str, entry: object) -> ConfigFile | None:
        """Returns the file that an entry of the defaults names; None if it is no such file."""
        if not isinstance(entry, str) or entry == _SELF:
            return None
        group = "" if entry.startswith("/") else f"{name.rpartition('/')[0]}/"
        beside = f"{group}{entry}".lstrip("/")
        return self._read(beside, is_start=False) if beside in self.homes else None


def translated_name(name: str) -> str:
    """Returns the name under which Hydra finds a changed file."""
    group, slash, stem = name.rpartition("/")
    return f"{group}{slash}_translated_{stem}"


def section_of(value: object) -> dict[str, object]:
    """Returns the settings of a correction, which may be a preset's name, or null for none."""
    return value if isinstance(value, dict) else {"preset": "disabled" if value is None else value}


def merged(sections: Iterable[tuple[str, dict[str, object]]]) -> dict[str, object]:
    """Merges corrections; ValueError if two places give a key different values."""
    settings: dict[str, object] = {}
    origin: dict[str, str] = {}
    for path, section in sections:
        for key, value in section.items():
            if key in settings and origin[key] != path and settings[key] != value:
                raise ValueError(
                    f"{origin[key]}.{key}={settings[key]!r} and {path}.{key}={value!r} contradict: "
                    "drop one of them"
                )
            settings[key] = value
            origin[key] = path
    return settings


def _join_corrections(tree: dict[str, Any]) -> None:
    """Moves the correction in verl-omni's place to ours: a file overrides one it builds on."""
    ours, theirs = (path.split(".")[0] for path in CORRECTION)
    if "rollout_correction" not in (tree.get(theirs) or {}):
        return
    section = tree.get(ours) or {}
    values = (section.get("rollout_correction", {}), tree[theirs].pop("rollout_correction"))
    sections = zip(CORRECTION, map(section_of, values), strict=True)
    tree[ours] = {**section, "rollout_correction": merged(sections)}


def is_correction(key: str) -> bool:
    """Returns whether a key is the rollout correction, which checks its own keys, or in it."""
    return key in CORRECTION or key.startswith(tuple(f"{path}." for path in CORRECTION))


def check_keys(values: Mapping[str, object], groups: Collection[str] = ()) -> None:
    """Checks keys and sections of a file or a command line, but for the rollout correction's."""
    known = known_keys()
    for key, value in values.items():
        if is_correction(key) or key.startswith(("hydra", *FREE_FORM)) or key in groups:
            continue
        if key not in known:
            raise ValueError(f"unknown key {key}: {_nearest(key, known, groups)}")
        below = [name for name in known if name.startswith(f"{key}.")]
        if below and not isinstance(value, Mapping):
            raise ValueError(f"{key}={value!r}: a section of keys, such as {min(below)}")
        if type(value) is int and isinstance(OmegaConf.select(typed_tree(), key), bool):
            section, _, name = key.rpartition(".")
            hints = get_type_hints(OmegaConf.get_type(typed_tree(), section))
            if value not in (0, 1) and str not in get_args(hints[name]):
                raise ValueError(f"{key}={value}: give true or false")


def no_file(name: str, names: Iterable[str], folders: Iterable[Path]) -> str:
    """Says that no file is called so, which name is nearest, and what there is or where it is."""
    known = sorted(names)
    few = f"there are {', '.join(known)}"
    all_of_them = few if len(known) < 5 else f"all are in {' and '.join(map(str, folders))}"
    return f"there is no {name!r}{did_you_mean(name, known)}; {all_of_them}"


def _nearest(key: str, known: Collection[str], groups: Collection[str]) -> str:
    if (ours := own_key(key)) is not None:
        return f"here that is {ours}"
    sections = sorted({name for name in known if "." not in name} | {*groups} - _NO_GROUPS)
    theirs = {name.removeprefix(PREFIX) for name in foreign()["verl_omni"]}
    near = [
        *difflib.get_close_matches(key, known, n=1, cutoff=0.7),
        *(name for name in sorted(known) if name.split(".")[-1] == key.split(".")[-1]),
        *(difflib.get_close_matches(key, {*known, *theirs}, n=1, cutoff=0.5) if "." in key else ()),
    ]
    if not near and "." not in key:
        return (
            f"there is no such section or group; there are {', '.join(sections)}, and the groups "
            "of a --config-dir"
        )
    return f"did you mean {near[0]}?" if near else "see --cfg job for all keys"

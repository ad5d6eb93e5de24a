"""Translates settings in verl-omni's words, of a command line or a file, by the table
`foreign.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

from flowgrpo_rc.config.rows import NONE, STOPS, TRANSLATED, Row
from flowgrpo_rc.config.setting import (
    PREFIX,
    REPLACED,
    Given,
    Outcome,
    Setting,
    Written,
    foreign,
)
from flowgrpo_rc.config.translate_rewards import REWARD_RULES, TERMS, chooses_rewards

MODEL = f"{PREFIX}model"
# A whole command gives both: verl-omni has no default for the second.
WHOLE = (f"{MODEL}.path", f"{PREFIX}rollout.name")
# Loggers of verl that this project does not have.
_THEIR_LOGGERS = ("vemlp_wandb", "clearml", "file")
# Keys of the loss and of the window's size, in both systems' words; the first that is given counts.
_LOSS = (
    "actor.diffusion_loss.loss_mode",
    f"{PREFIX}actor.diffusion_loss.loss_mode",
    f"{PREFIX}actor.policy_loss.loss_mode",
)
_SIZE = (
    f"{PREFIX}rollout.algo.sde_window_size",
    f"{PREFIX}rollout.sde_window_size",
    "rollout.algo.sde_window_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslatedOverrides:
    """Overrides in this project's naming.

    Attributes:
      lines: the overrides.
      values: key here -> value, of the settings that have been translated.
      rows: one for each setting that had another name or value.
    """

    lines: Sequence[str]
    values: Mapping[str, Any]
    rows: Sequence[Row]


@cache
def foreign_keys() -> Mapping[str, Any]:
    """Returns the keys of verl-omni that have a line in the table, and what it says."""
    return {
        f"{section}.{name}".rstrip("."): row
        for section, rows in foreign("verl_omni").items()
        for name, row in rows.items()
    }


def is_whole_command(keys: Collection[str]) -> bool:
    """Returns whether these are the keys of a whole command line of verl-omni, not of a few."""
    return all(key in keys for key in WHOLE)


def translate(
    settings: Sequence[Setting],
    known: Collection[str],
    *,
    beside: Given | None = None,
    whole: bool = False,
) -> TranslatedOverrides:
    """Translates settings. A key that neither system has stays, for the caller to refuse.

    Args:
      settings: the overrides as given.
      known: this project's keys.
      beside: values of keys that are set elsewhere, which rules look at.
      whole: whether what is not given is verl-omni's default.

    Raises:
      ValueError: two names of the other system set one key to different values.
    """
    # Of several settings of one key the last one counts, as with Hydra.
    last = {setting.key: setting for setting in settings}
    given = dict(beside or {}) | {key: setting.value for key, setting in last.items()}
    lines = _Lines()
    values: dict[str, Any] = {}
    rows: list[Row] = []
    for setting in last.values():
        outcome = _outcome(setting, given, known)
        if outcome is None:
            lines.add(setting.key, setting.line, setting)
            continue
        here = [f"{key}={write(value)}" for key, value in outcome.settings.items()]
        for (key, value), line in zip(outcome.settings.items(), here, strict=True):
            lines.add(key, line, setting)
            as_given = isinstance(value, Written) and value == setting.text
            values[key] = setting.value if as_given else value
        if here == [setting.line]:
            continue
        told = [*here, outcome.why] if outcome.why else here
        translated = TRANSLATED if outcome.settings else NONE
        kind = STOPS if outcome.stops else translated
        rows.append(Row(kind, setting.line, "; ".join(told), setting.key))
    rows = [lines.with_replacement(row) for row in rows]
    if whole:
        rows += _unsaid(given)
    return TranslatedOverrides(lines=lines.lines(), values=values, rows=rows)


class _Lines:
    """Overrides in this project's naming, and which setting of the user each came from."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[str, Setting]] = {}
        self._replaced: dict[str, str] = {}

    def add(self, key: str, line: str, setting: Setting) -> None:
        """Adds a line. One in this project's own words replaces an earlier translated one.

        Raises:
          ValueError: an earlier line says something else, and neither replaces the other.
        """
        other_line, other = self._lines.get(key, (line, setting))
        differs = line.partition("=")[2] != other_line.partition("=")[2]
        if other.key != setting.key and differs:
            if setting.key != key:
                raise ValueError(
                    f"{other.line} and {setting.line} both set {key}, and contradict: drop one of "
                    "them"
                )
            self._replaced[other.key] = setting.line
        self._lines[key] = (line, setting)

    def lines(self) -> list[str]:
        return [line for line, _ in self._lines.values()]

    def with_replacement(self, row: Row) -> Row:
        """Says in a row what has replaced it, if anything has."""
        if row.key not in self._replaced:
            return row
        settings = row.here.split("; ")[1:]
        return row._replace(here="; ".join([f"{REPLACED} {self._replaced[row.key]}", *settings]))


def write(value: Any) -> str:
    """Returns a value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(write(item) for item in value)}]"
    return str(value)


def _unsaid(given: Given) -> list[Row]:
    """Returns a row for each default of verl-omni that has no counterpart and is not given."""
    unsaid = []
    if not chooses_rewards(given):
        why = "there the rows of the data choose it by data_source: set it"
        unsaid.append(Row(STOPS, f"{TERMS} (not given)", why, TERMS))
    for key, value in foreign("unsaid").items():
        if key not in given and key.removeprefix(PREFIX) not in given:
            outcome = _by(foreign_keys()[key], Setting("", key, value, str(value)), given)
            if outcome.stops:
                unsaid.append(Row(STOPS, f"{key}={value} (not given)", outcome.why, key))
    return unsaid


def _outcome(setting: Setting, given: Given, known: Collection[str]) -> Outcome | None:
    """Returns what becomes of a setting; None if it is not translated."""
    if setting.key in foreign_keys():
        return _by(foreign_keys()[setting.key], setting, given)
    own = setting.key.removeprefix(PREFIX)
    for key in (setting.key, PREFIX + own) if own not in known else ():
        row = _row_of(key)
        if row is not None:
            return _by(row, setting._replace(key=key), given)
    return None if own == setting.key else Outcome({own: Written(setting.text)})


def _row_of(key: str) -> Any:
    """Returns the row of a key, or of the nearest section above it; None if there is none."""
    row = foreign_keys().get(key)
    section = key
    while section and row is None:
        section = section.rpartition(".")[0]
        row = foreign_keys().get(section)
    # What has a counterpart is no section.
    is_key = isinstance(row, Mapping) and "to" in row
    return None if section != key and is_key else row


def _by(row: Any, setting: Setting, given: Given) -> Outcome:
    """Returns what a row of the table makes of a setting."""
    if isinstance(row, str):
        return Outcome(why=row)
    if "rule" in row:
        return _RULES[row["rule"]](setting, given)
    if "if" in row and not _CONDITIONS[row["if"]](setting.value, given):
        return _by(row["else"], setting, given)
    for value, chosen in row.get("at", {}).items():
        if _same(value, setting.value):
            return _by(chosen, setting, given)
    if any(_same(value, setting.value) for value in row.get("as_here", ())):
        return Outcome(why="as here")
    if "stop" in row:
        return Outcome(why=row["stop"], stops=True)
    if "set" in row:
        return Outcome(row["set"], row.get("why", ""))
    text = row.get("as", setting.text).replace("VALUE", str(setting.value))
    values = row.get("values", {}).items()
    found = [here for there, here in values if _same(there, setting.value)]
    return Outcome({row["to"]: found[0] if found else Written(text)})


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; True and 1 are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _is_dppo(given: Given) -> bool:
    found = [given[key] for key in (*_LOSS, f"{MODEL}.algorithm") if key in given]
    return bool(found) and found[0] == "flow_dppo"


def _is_positive(value: Any) -> bool:
    return value is not None and value > 0


def _has_window(given: Given) -> bool:
    sizes = [given[name] for name in _SIZE if name in given]
    return None not in sizes if sizes else not is_whole_command(given)


def _has_own_template(value: Any) -> bool:
    """Returns whether a chat template makes anything but the user's text of a chat."""
    chat = (("system", "the system's text"), ("user", "the user's text"))
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = SandboxedEnvironment().from_string(str(value)).render(messages=messages)
    except Exception:  # a template is foreign code
        return True
    return text != "the user's text"


def _has_own_tokenizer(value: Any, given: Given) -> bool:
    model = given.get(f"{MODEL}.path", given.get("model.path"))
    return value is not None and not str(value).startswith(f"{model}/")


# What `if` names in the table: of the key's value, and of all values.
_CONDITIONS: Mapping[str, Callable[[Any, Given], bool]] = {
    "flow_dppo": lambda value, given: _is_dppo(given),
    "other_loss": lambda value, given: not _is_dppo(given),
    "no_loss_mode": lambda value, given: not any(key in given for key in _LOSS),
    "no_total_steps": lambda value, given: given.get("trainer.total_training_steps") is None,
    "window_size": lambda value, given: _has_window(given),
    "positive": lambda value, given: _is_positive(value),
    "negative": lambda value, given: isinstance(value, int) and value < 0,
    "warmup_ratio": lambda value, given: (
        bool(value) and not _is_positive(given.get(f"{PREFIX}actor.optim.lr_warmup_steps"))
    ),
    "listed": lambda value, given: value is None or isinstance(value, list),
    "other_template": lambda value, given: value is not None and _has_own_template(value),
    "other_tokenizer": _has_own_tokenizer,
}


def _loggers(setting: Setting, given: Given) -> Outcome:
    """Takes a single name, too, and drops loggers that have no counterpart."""
    is_list = isinstance(setting.value, list)
    asked = setting.value if is_list else [setting.value]
    dropped = [name for name in asked if name in _THEIR_LOGGERS]
    known = [name for name in asked if name not in dropped]
    if not dropped:
        return Outcome({"trainer.logger": Written(setting.text) if is_list else known})
    why = f"there is no {', '.join(dropped)}; metrics.jsonl is always written"
    return Outcome({"trainer.logger": known}, why)


_RULES = {**REWARD_RULES, "loggers": _loggers}

# --- Files


def leaves(
    tree: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and value of everything in a tree that is no filled section."""
    for name, value in tree.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def values_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each key of a tree, such as {"rollout.n": 8}."""
    return {".".join(path): value for path, value in leaves(tree)}


def translate_tree(
    tree: Mapping[str, Any], known: Collection[str], beside: Given
) -> tuple[dict[str, Any], list[Row]]:
    """Translates a file. A key that neither system has stays, for the caller to refuse.

    Returns:
      The content in this project's naming, and a row for each setting that had another name or
      value.

    Raises:
      ValueError: two names set one key to different values.
    """
    paths = {".".join(path): (path, value) for path, value in leaves(tree)}
    settings = [
        Setting(f"{key}={write(value)}", key, value, write(value))
        for key, (_, value) in paths.items()
    ]
    translated = translate(settings, known, beside=beside)
    found = deepcopy(dict(tree))
    for row in translated.rows:
        _remove(found, paths[row.key][0])
    for key, value in translated.values.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
        place[name] = value
    return found, list(translated.rows)


def _remove(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    """Removes a leaf, and the sections that are empty without it."""
    name, *below = path
    if below and isinstance(tree[name], dict):
        _remove(tree[name], tuple(below))
    if not below or not tree[name]:
        del tree[name]

"""Translates settings in verl-omni's words, of a command line or a file, by `foreign.yaml`."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.sandbox import SandboxedEnvironment

from flowgrpo_rc.config.rows import NONE, REPEATED, STOPS, TRANSLATED, Row
from flowgrpo_rc.config.setting import AS_GIVEN, PREFIX, REPLACED, Given, Outcome, Setting, foreign
from flowgrpo_rc.config.translate_rewards import REWARD_RULES, TERMS, chooses_rewards
from flowgrpo_rc.config.tree import known_keys

MODEL = f"{PREFIX}model"
# A whole command gives both: verl-omni has no default for the second.
WHOLE = (f"{MODEL}.path", f"{PREFIX}rollout.name")
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
_FRAMES = "rollout.pipeline.num_frames"
# Loggers of verl that this project does not have.
_THEIR_LOGGERS = ("vemlp_wandb", "clearml", "file")


class TranslatedOverrides(NamedTuple):
    """Overrides in this project's naming."""

    lines: Sequence[str]
    values: Mapping[str, Any]  # of the settings that have been translated, by the key here
    rows: Sequence[Row]  # one for each setting that had another name or value


def is_whole_command(keys: Collection[str]) -> bool:
    """Returns whether these are the keys of a whole command line of verl-omni, not of a few."""
    return all(key in keys for key in WHOLE)


def translate(
    settings: Sequence[Setting], *, beside: Given | None = None, whole: bool = False
) -> TranslatedOverrides:
    """Translates settings. A key that neither system has stays, for the caller to refuse.

    Rules look at `beside`, too: values that are set elsewhere. What is not given of a `whole`
    command is verl-omni's default.
    """
    # Of several settings of one key the last one counts, as with Hydra, and so does its place.
    last: dict[str, Setting] = {}
    rows = []
    for setting in settings:
        earlier = last.pop(setting.key, setting)
        if earlier.value != setting.value:
            rows.append(_replaced(earlier, setting.line))
        last[setting.key] = setting
    given = dict(beside or {}) | {key: setting.value for key, setting in last.items()}
    outcomes = {key: _outcome(setting, given) for key, setting in last.items()}
    lines: dict[str, tuple[str, Setting]] = {}
    replaced: dict[str, str] = {}
    for setting in last.values():
        for key, line in _lines(setting, outcomes[setting.key]).items():
            before, other = lines.get(key, (line, setting))
            if other.key != setting.key and before.partition("=")[2] != line.partition("=")[2]:
                # Of a key with and without prefix the last one counts, as of any repeated key.
                if setting.key != key and _own(setting.key) != _own(other.key):
                    raise ValueError(
                        f"{other.line} and {setting.line} both set {key}, and contradict: drop one "
                        "of them"
                    )
                # This project's own word replaces a translated one before it, too.
                replaced[other.key] = setting.line
            lines[key] = (line, setting)
    translated = [(last[key], outcome) for key, outcome in outcomes.items() if outcome is not None]
    rows += [row for each in translated for row in _rows(*each, replaced)]
    if whole:
        rows += _unsaid(given)
    return TranslatedOverrides(
        lines=[line for line, _ in lines.values()],
        values={
            key: setting.value if value is AS_GIVEN else value
            for setting, outcome in translated
            for key, value in outcome.settings.items()
        },
        rows=rows,
    )


def _own(key: str) -> str:
    return key.removeprefix(PREFIX)


def _lines(setting: Setting, outcome: Outcome | None) -> dict[str, str]:
    """Returns the override of each key that a setting becomes."""
    if outcome is None:
        return {setting.key: setting.line}
    return {
        key: f"{key}={setting.text if value is AS_GIVEN else write(value)}"
        for key, value in outcome.settings.items()
    }


def _rows(setting: Setting, outcome: Outcome, replaced: Mapping[str, str]) -> Iterator[Row]:
    """Yields a row for a setting that has another name or value here."""
    told = [*_lines(setting, outcome).values()]
    if setting.key in replaced:
        yield _replaced(setting, replaced[setting.key])
        return
    if told == [setting.line]:
        return
    told += [outcome.why] if outcome.why else []
    translated = TRANSLATED if outcome.settings else NONE
    kind = STOPS if outcome.stops else translated
    yield Row(kind, setting.line, "; ".join(told), setting.key)


def _replaced(setting: Setting, line: str) -> Row:
    return Row(REPEATED, setting.line, f"{REPLACED} {line}", setting.key)


def write(value: Any) -> str:
    """Returns a value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(write(item) for item in value)}]"
    return str(value)


def _unsaid(given: Given) -> Iterator[Row]:
    """Yields a row for each default of verl-omni that has no counterpart and is not given."""
    if not chooses_rewards(given):
        why = "there the rows of the data choose it by data_source: set it"
        yield Row(STOPS, f"{TERMS} (not given)", why, TERMS)
    for key, value in foreign()["unsaid"].items():
        if key not in given and key.removeprefix(PREFIX) not in given:
            outcome = _by(foreign()["verl_omni"][key], Setting("", key, value, str(value)), given)
            if outcome.stops:
                yield Row(STOPS, f"{key}={value} (not given)", outcome.why, key)


def _outcome(setting: Setting, given: Given) -> Outcome | None:
    """Returns what becomes of a setting; None if it is not translated."""
    own = _own(setting.key)
    names = [setting.key] if own in known_keys() else [setting.key, PREFIX + own]
    for key in names:
        row = _row_of(key)
        if row is not None:
            return _by(row, setting._replace(key=key), given)
    return None if own == setting.key else Outcome({own: AS_GIVEN})


def _row_of(key: str) -> Any:
    """Returns the row of a key, or of the nearest section above it; None if there is none."""
    rows = foreign()["verl_omni"]
    section = key
    while section and section not in rows:
        section = section.rpartition(".")[0]
    row = rows.get(section)
    # What has a counterpart is no section.
    is_key = isinstance(row, Mapping) and "to" in row
    return None if section != key and is_key else row


def _by(row: Any, setting: Setting, given: Given) -> Outcome:
    """Returns what a row of the table makes of a setting."""
    if isinstance(row, str):
        return Outcome(why=row)
    if "rule" in row:
        return _RULES[row["rule"]](setting, given)
    if "loss" in row and _loss_of(given) != row["loss"]:
        return Outcome(why=f"belongs to loss_mode={row['loss']}")
    if _loss_of(given) in row.get("unread", ()):
        return Outcome(why=f"not read there with loss_mode={_loss_of(given)}")
    if "if" in row and not _CONDITIONS[row["if"]](setting.value, given):
        return _by(row["else"], setting, given)
    for value, chosen in row.get("at", {}).items():
        if _same(value, setting.value):
            return _by(chosen, setting, given)
    if any(_same(value, setting.value) for value in row.get("as_here", ())):
        return Outcome(why="as here")
    if "stop" in row:
        return Outcome(why=row["stop"], stops=True)
    found = dict(row.get("set", {}))
    if "to" in row:
        found[row["to"].replace("*", setting.key.rpartition(".")[2])] = _written(row, setting.value)
    for key, value in row.get("unsaid", {}).items():
        if key not in given and _own(key) not in given:
            default = _by(_row_of(key), Setting("", key, value, str(value)), given).settings
            for name, here in default.items():
                if name not in given:
                    found[name] = value if here is AS_GIVEN else here
    return Outcome(found, row.get("why", ""))


def _written(row: Mapping[str, Any], value: Any) -> Any:
    """Returns a value of the other system as it is written here."""
    for there, here in row.get("values", {}).items():
        if _same(there, value):
            return here
    return row["as"].replace("VALUE", str(value)) if "as" in row else AS_GIVEN


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; True and 1 are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _loss_of(given: Given) -> Any:
    return next((given[key] for key in (*_LOSS, f"{MODEL}.algorithm") if key in given), None)


def _is_positive(value: Any) -> bool:
    return value is not None and value > 0


def _has_window(value: Any, given: Given) -> bool:
    sizes = [given[name] for name in _SIZE if name in given]
    return None not in sizes if sizes else not is_whole_command(given)


def _has_own_template(value: Any, given: Given) -> bool:
    """Returns whether a chat template makes anything but the user's text of a chat."""
    if value is None:
        return False
    chat = (("system", "the system's text"), ("user", "the user's text"))
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = SandboxedEnvironment().from_string(str(value)).render(messages=messages)
    except Exception:  # a template is foreign code
        return True
    return text != "the user's text"


def _draws_more(value: Any, given: Given) -> bool:
    """Returns whether a run draws more prompts than so many, which verl-omni picks at random."""
    if value in (None, -1):
        return False
    steps, prompts = given.get("trainer.total_training_steps"), given.get("data.train_batch_size")
    if steps is None or prompts is None or given.get("data.shuffle") is False:
        return True
    return bool(steps * prompts > value)


def _has_own_tokenizer(value: Any, given: Given) -> bool:
    model = given.get(f"{MODEL}.path", given.get("model.path"))
    return value is not None and not str(value).startswith(f"{model}/")


# What `if` names in the table: of the key's value, and of all values.
_CONDITIONS: Mapping[str, Callable[[Any, Given], bool]] = {
    "nft": lambda value, given: _loss_of(given) == "diffusion_nft",
    "no_fixed_decay": lambda value, given: given.get("algorithm.old_policy_decay") is None,
    "draws_more": _draws_more,
    "filters_groups": lambda value, given: bool(given.get("algorithm.filter_groups.enable")),
    "no_loss_mode": lambda value, given: not any(key in given for key in _LOSS),
    "no_total_steps": lambda value, given: given.get("trainer.total_training_steps") is None,
    "window_size": _has_window,
    "positive": lambda value, given: _is_positive(value),
    "negative": lambda value, given: isinstance(value, int) and value < 0,
    "warmup_ratio": lambda value, given: (
        bool(value) and not _is_positive(given.get(f"{PREFIX}actor.optim.lr_warmup_steps"))
    ),
    "videos": lambda value, given: given.get(f"{PREFIX}{_FRAMES}", given.get(_FRAMES, 1)) != 1,
    "listed": lambda value, given: value is None or isinstance(value, list),
    "other_template": _has_own_template,
    "other_tokenizer": _has_own_tokenizer,
    "verl_omni": lambda value, given: any(key.startswith(PREFIX) for key in given),
}


def _loggers(setting: Setting, given: Given) -> Outcome:
    """Takes a single name, too, and drops loggers that have no counterpart."""
    asked = setting.value if isinstance(setting.value, list) else [setting.value]
    dropped = [name for name in asked if name in _THEIR_LOGGERS]
    known = [name for name in asked if name not in dropped]
    why = f"there is no {', '.join(dropped)}; metrics.jsonl is always written" if dropped else ""
    return Outcome({"trainer.logger": AS_GIVEN if known == setting.value else known}, why)


def _deviation(setting: Setting, given: Given) -> Outcome:
    """Lets the estimator say what advantages are divided by, which two switches say there."""
    by_batch = given.get("algorithm.global_std")
    fits: list[str | None] = ["flow_grpo", "dance_grpo", "gdpo"]
    if not given.get("algorithm.norm_adv_by_std_in_grpo", True):
        fits = ["dr_grpo", "rloo"]
    elif by_batch is None:  # any deviation will do, and so will the estimator of a file
        fits += ["grpo", None]
    elif not by_batch:
        fits = ["grpo"]
    chosen = given.get("algorithm.adv_estimator")
    if chosen in fits:
        return Outcome(why="as here")
    if chosen is None:
        return Outcome({"algorithm.adv_estimator": fits[0]})
    return Outcome(why=f"here that is algorithm.adv_estimator={fits[0]}", stops=True)


_RULES = {**REWARD_RULES, "loggers": _loggers, "deviation": _deviation}

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


def translate_tree(tree: Mapping[str, Any], beside: Given) -> tuple[dict[str, Any], list[Row]]:
    """Returns a file in this project's naming, and the rows of what had another name or value.

    A key that neither system has stays, for the caller to refuse.
    """
    settings = [
        Setting(f"{key}={write(value)}", key, value, write(value))
        for key, value in values_of(tree).items()
    ]
    translated = translate(settings, beside=beside)
    gone = {row.key for row in translated.rows}
    paths = {path: value for path, value in leaves(tree) if ".".join(path) not in gone}
    for key, value in translated.values.items():
        paths.setdefault(tuple(key.split(".")), value)
    found: dict[str, Any] = {}
    for (*sections, name), value in paths.items():
        place = found
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise ValueError(f"{section}={place!r}: a section of keys, such as {name}")
        place[name] = value
    return found, list(translated.rows)

"""Translates settings in verl-omni's words, of a command line or a file, by `foreign.yaml`."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flowgrpo_rc.config.foreign import PREFIX, Fields, ForeignReward, foreign, row_of
from flowgrpo_rc.config.rows import NONE, REPEATED, REPLACED, STOPS, TRANSLATED, Row
from flowgrpo_rc.config.tree import known_keys

# Values of settings by their keys, with and without prefix.
Values = Mapping[str, Any]
# A whole command gives both: verl-omni has no default for the second.
WHOLE = (f"{PREFIX}model.path", f"{PREFIX}rollout.name")
_TERMS = "reward.terms"
_FUNCTION = "reward.custom_reward_function.path"
_FUNCTIONS = "reward.reward_functions"


class Setting(NamedTuple):
    """An override, or a key of a file; `key` is without `+`, and `text` is the value as written."""

    line: str
    key: str
    value: object
    text: str


class Outcome(NamedTuple):
    """Says what becomes of a setting."""

    settings: Values = MappingProxyType({})  # key and value here; empty without a counterpart
    why: str = ""  # what the user should know
    # Whether there is no counterpart, and without the key something else would be trained.
    stops: bool = False

    def kind(self) -> str:
        """Returns the kind of its row."""
        if self.stops:
            return STOPS
        return TRANSLATED if self.settings else NONE

    def lines(self, setting: Setting) -> dict[str, str]:
        """Returns the override of each key; a value that is passed on stays as it was written."""
        return {
            key: f"{key}={setting.text if value is setting.value else write(value)}"
            for key, value in self.settings.items()
        }


class TranslatedOverrides(NamedTuple):
    """Overrides in this project's naming."""

    lines: Sequence[str]
    values: Values  # by the key here
    rows: Sequence[Row]  # one for each setting that had another name or value


def is_whole_command(keys: Collection[str]) -> bool:
    """Returns whether these are the keys of a whole command line of verl-omni, not of a few."""
    return all(key in keys for key in WHOLE)


def translate(
    settings: Sequence[Setting], *, beside: Values | None = None, whole: bool = False
) -> TranslatedOverrides:
    """Translates settings. A key that neither system has stays, for the caller to refuse.

    Rules look at `beside`, too: values that are set elsewhere. What is not given of a `whole`
    command is verl-omni's default.
    """
    # Of several settings of one key the last one counts, as with Hydra, and so does its place.
    last: dict[str, Setting] = {}
    rows: list[Row] = []
    for setting in settings:
        earlier = last.pop(setting.key, setting)
        if earlier.value != setting.value:
            rows.append(_replaced(earlier, setting.line))
        last[setting.key] = setting
    values = dict(beside or {}) | {key: setting.value for key, setting in last.items()}
    lines: dict[str, str] = {}
    sources: dict[str, Setting] = {}
    translated: dict[str, object] = {}
    replaced: dict[str, str] = {}
    outcomes = [(setting, _outcome(setting, values)) for setting in last.values()]
    for setting, outcome in outcomes:
        overrides = {setting.key: setting.line} if outcome is None else outcome.lines(setting)
        for key, line in overrides.items():
            other = sources.get(key, setting)
            if _text(lines.get(key, line)) != _text(line):
                # Of a key with and without prefix the last one counts, as of any repeated key.
                if setting.key != key and _bare(setting.key) != _bare(other.key):
                    raise ValueError(
                        f"{other.line} and {setting.line} both set {key}, and contradict: drop one"
                    )
                # This project's own word replaces a translated one before it, too.
                replaced[other.key] = setting.line
            lines[key] = line
            sources[key] = setting
            translated[key] = setting.value if outcome is None else outcome.settings[key]
    for setting, outcome in outcomes:
        if outcome is None:
            continue
        words = [*outcome.lines(setting).values()]
        if setting.key in replaced:
            rows.append(_replaced(setting, replaced[setting.key]))
        elif words != [setting.line]:
            meaning = "; ".join([*words, outcome.why] if outcome.why else words)
            rows.append(Row(outcome.kind(), setting.line, meaning, setting.key))
    if whole:
        rows += _unsaid(values)
    return TranslatedOverrides([*lines.values()], translated, rows)


def _bare(key: str) -> str:
    return key.removeprefix(PREFIX)


def _text(line: str) -> str:
    return line.partition("=")[2]


def _replaced(setting: Setting, line: str) -> Row:
    return Row(REPEATED, setting.line, f"{REPLACED} {line}", setting.key)


def write(value: object) -> str:
    """Returns a value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(write(item) for item in value)}]"
    return str(value)


def _unsaid(values: Values) -> Iterator[Row]:
    """Yields a row for each default of verl-omni that has no counterpart and is not given."""
    choosing = (_TERMS, _FUNCTION, f"{_FUNCTIONS}.")
    if not any(key.startswith(choosing) and value is not None for key, value in values.items()):
        why = "there the rows of the data choose it by data_source: set it"
        yield Row(STOPS, f"{_TERMS} (not given)", why, _TERMS)
    for key, value in foreign()["unsaid"].items():
        if _value(values, _bare(key), ...) is ...:
            outcome = _of_default(key, value, values)
            if outcome.stops:
                yield Row(STOPS, f"{key}={value} (not given)", outcome.why, key)


# --- Rows of the table


def _outcome(setting: Setting, values: Values) -> Outcome | None:
    """Returns what becomes of a setting; None if it is not translated."""
    bare = _bare(setting.key)
    for key in [setting.key] if bare in known_keys() else [setting.key, PREFIX + bare]:
        if (row := row_of(key)) is not None:
            return applied(row, setting._replace(key=key), values)
    return None if bare == setting.key else Outcome({bare: setting.value})


def applied(row: str | Fields, setting: Setting, values: Values) -> Outcome:
    """Returns what a row of the table makes of a setting."""
    if isinstance(row, str):
        return Outcome(why=row)
    if "rule" in row:
        return _RULES[row["rule"]](setting, values)
    if (reason := _unread(row, setting.value, values)) is not None:
        return applied(reason, setting, values)
    for value, row_of_value in row.get("at", {}).items():
        if _same(value, setting.value):
            return applied(row_of_value, setting, values)
    if any(_same(value, setting.value) for value in row.get("same", ())):
        return Outcome(why="as here")
    if "stop" in row:
        return Outcome(why=row["stop"], stops=True)
    settings = dict(row.get("set", {}))
    if "to" in row:
        settings[row["to"]] = _written(row, setting.value)
    for key, value in row.get("unsaid", {}).items():
        if _value(values, _bare(key), ...) is ...:
            default = _of_default(key, value, values)
            settings |= {key: value for key, value in default.settings.items() if key not in values}
    return Outcome(settings, row.get("why", ""))


def _of_default(key: str, value: object, values: Values) -> Outcome:
    """Returns what becomes of a default of verl-omni, whose key has a row."""
    row = row_of(key)
    assert row is not None
    return applied(row, Setting("", key, value, str(value)), values)


def _unread(row: Fields, value: object, values: Values) -> str | Fields | None:
    """Returns what holds in place of a row that is not read beside these values; None if it is."""
    loss = _loss_of(values)
    if "loss" in row and loss != row["loss"]:
        return row.get("else", f"belongs to loss_mode={row['loss']}")
    if loss in row.get("unread", ()):
        return f"not read there with loss_mode={loss}"
    for key in row.get("unless", ()):
        if _value(values, key) is not None:
            return f"{key} decides"
    if "if" in row and not _CONDITIONS[row["if"]](value, values):
        return row["else"]
    return None


def _written(row: Fields, value: object) -> object:
    """Returns a value of the other system as it is written here."""
    for foreign_value, own_value in row.get("values", {}).items():
        if _same(foreign_value, value):
            return own_value
    return row["as"].replace("VALUE", str(value)) if "as" in row else value


def _same(first: object, second: object) -> bool:
    """Returns whether two values are equal; True and 1 are not."""
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


def _value(values: Values, key: str, default: object = None) -> Any:
    """Returns the value of a key with or without prefix."""
    return values.get(key, values.get(PREFIX + key, default))


def _loss_of(values: Values) -> object:
    keys = ("actor.diffusion_loss.loss_mode", "actor.policy_loss.loss_mode", "model.algorithm")
    modes = (_value(values, key) for key in keys)
    return next((mode for mode in modes if mode is not None), None)


# --- Rules that look at other keys


def _has_window(value: object, values: Values) -> bool:
    keys = ("rollout.algo.sde_window_size", "rollout.sde_window_size")
    sizes = [size for key in keys if (size := _value(values, key, ...)) is not ...]
    return None not in sizes if sizes else not is_whole_command(values)


def _draws_more(value: Any, values: Values) -> bool:
    """Returns whether a run draws more prompts than so many, which verl-omni picks at random."""
    if value in (None, -1):
        return False
    steps = values.get("trainer.total_training_steps")
    prompts = values.get("data.train_batch_size")
    if steps is None or prompts is None or values.get("data.shuffle") is False:
        return True
    return bool(steps * prompts > value)


def _warms_up_by_ratio(value: object, values: Values) -> bool:
    return bool(value) and (_value(values, "actor.optim.lr_warmup_steps") or 0) <= 0


# What `if` names in the table: of the key's value, and of all values.
_CONDITIONS: Mapping[str, Callable[[object, Values], bool]] = {
    "draws_more": _draws_more,
    "filters_groups": lambda value, values: bool(values.get("algorithm.filter_groups.enable")),
    "window_size": _has_window,
    "warms_up_by_ratio": _warms_up_by_ratio,
    "videos": lambda value, values: _value(values, "rollout.pipeline.num_frames", 1) != 1,
    "other_tokenizer": lambda value, values: (
        not str(value).startswith(f"{_value(values, 'model.path')}/")
    ),
    "verl_omni": lambda value, values: any(key.startswith(PREFIX) for key in values),
}


def _loggers(setting: Setting, values: Values) -> Outcome:
    """Takes a single name, too, and drops loggers that have no counterpart."""
    names = setting.value if isinstance(setting.value, list) else [setting.value]
    known = [name for name in names if name not in foreign()["loggers"]]
    dropped = ", ".join(str(name) for name in names if name not in known)
    why = f"there is no {dropped}; metrics.jsonl is always written" if dropped else ""
    return Outcome({"trainer.logger": setting.value if known == setting.value else known}, why)


def _deviation(setting: Setting, values: Values) -> Outcome:
    """Lets the estimator say what advantages are divided by, which two switches say there."""
    by_batch = values.get("algorithm.global_std")
    estimators: list[str | None] = ["flow_grpo", "dance_grpo", "gdpo"]
    if not values.get("algorithm.norm_adv_by_std_in_grpo", True):
        estimators = ["dr_grpo", "rloo"]
    elif by_batch is None:  # any deviation will do, and so will the estimator of a file
        estimators += ["grpo", None]
    elif not by_batch:
        estimators = ["grpo"]
    chosen = values.get("algorithm.adv_estimator")
    if chosen in estimators:
        return Outcome(why="as here")
    if chosen is None:
        return Outcome({"algorithm.adv_estimator": estimators[0]})
    return Outcome(why=f"here that is algorithm.adv_estimator={estimators[0]}", stops=True)


# --- Rewards


def _scorer(path: object) -> ForeignReward:
    """Returns the reward here that scores as a file of verl-omni does; empty if there is none.

    The file is `a/b/genrm_ocr.py` or `pkg://a.b.genrm_ocr`.
    """
    name = str(path).rsplit("/", 1)[-1].removesuffix(".py").rsplit(".", 1)[-1]
    return foreign()["rewards"].get(name, {})


def _functions(values: Values) -> dict[str, object]:
    """Returns the file of each reward function, by the name that its term has here."""
    paths = {
        key.split(".")[2]: path
        for key, path in values.items()
        if key.startswith(f"{_FUNCTIONS}.") and key.endswith(".path")
    }
    path = values.get(_FUNCTION)
    if path is not None and not paths:
        return {_scorer(path).get("name", "function"): path}
    return paths


def _own_terms(values: Values) -> list[str]:
    """Returns the user's own terms, which take the place of reward functions.

    Options of a translated term refine it, and a term of weight 0 is only logged.
    """
    chosen: dict[str, bool] = {}
    for key, value in values.items():
        if key == _TERMS and isinstance(value, Mapping):
            chosen |= {str(name): term is not None for name, term in value.items()}
        elif key.startswith(f"{_TERMS}."):
            name, _, option = key.removeprefix(f"{_TERMS}.").partition(".")
            chosen[name] = value is not None and (option, value) != ("weight", 0)
    functions = _functions(values)
    return [f"{_TERMS}.{name}" for name in chosen if chosen[name] and name not in functions]


def _reward(setting: Setting, values: Values) -> Outcome:
    """Returns what a key of verl-omni's reward functions, or of its reward model, is here."""
    if setting.value in (None, {}) or setting.value is False:
        return Outcome(why="none is asked for")
    if own_terms := _own_terms(values):
        return Outcome(why=f"{REPLACED} {', '.join(own_terms)}")
    functions = _functions(values)
    readers = [name for name, path in functions.items() if "url" in _scorer(path)]
    name, _, option = setting.key.removeprefix(f"{_FUNCTIONS}.").rpartition(".")
    if option == "model_path":
        models = {f"{_TERMS}.{reader}.model": setting.value for reader in readers}
        return Outcome(models, "" if models else "belongs to reward_model.enable")
    if option == "enable" and readers:
        return Outcome(why=str(foreign()["verl_omni"]["reward.reward_model"]))
    if setting.key == _FUNCTION:
        name = next(iter(functions))
        if functions[name] != setting.value:
            return Outcome(why=f"{_FUNCTIONS} are given")
    scorer = _scorer(functions.get(name))
    if option == "path":
        return _term(name, scorer, values)
    if option in ("name", "required") or (name in functions and not scorer):
        return Outcome(why=f"belongs to {_FUNCTIONS}.{name}.path")
    if option == "weight" and scorer and isinstance(setting.value, int | float):
        return Outcome({f"{_TERMS}.{name}.weight": setting.value * (1 / scorer["divisor"])})
    return Outcome(why=f"rewards are set in {_TERMS}", stops=True)


def _term(name: str, scorer: ForeignReward, values: Values) -> Outcome:
    """Returns the term that a reward function is here; it takes the place of the bundled `ocr`."""
    key = f"{_TERMS}.{name}"
    if values.get(key, ...) is None:
        return Outcome(why=f"dropped by {key}=null")
    if not scorer:
        known = ", ".join(foreign()["rewards"])
        return Outcome(why=f"set {_TERMS}; only {known} have a counterpart", stops=True)
    settings: dict[str, object] = {}
    if "ocr" not in _functions(values) and f"{_TERMS}.ocr" not in values:
        settings[f"{_TERMS}.ocr"] = None
    if name != scorer["name"]:
        settings[f"{key}._target_"] = scorer["name"]
    if scorer["divisor"] != 1 and f"{_FUNCTIONS}.{name}.weight" not in values:
        settings[f"{key}.weight"] = 1 / scorer["divisor"]
    if "url" in scorer and f"{key}.url" not in values:
        settings[f"{key}.url"] = scorer["url"]
    model = values.get("reward.reward_model.model_path", "MODEL")
    return Outcome(settings, scorer.get("why", "").replace("MODEL", str(model)))


# What `rule` names in the table.
_RULES: Mapping[str, Callable[[Setting, Values], Outcome]] = {
    "loggers": _loggers,
    "deviation": _deviation,
    "reward": _reward,
}

# --- Files


def leaves(
    tree: Mapping[str, object], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yields the path and value of everything in a tree that is no filled section."""
    for name, value in tree.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def values_of(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the value of each key of a tree, such as {"rollout.n": 8}."""
    return {".".join(path): value for path, value in leaves(tree)}


def translate_tree(
    tree: Mapping[str, object], beside: Values
) -> tuple[dict[str, object], list[Row]]:
    """Returns a file in this project's naming, and the rows of what had another name or value.

    A key that neither system has stays, for the caller to refuse.
    """
    settings = [
        Setting(f"{key}={write(value)}", key, value, write(value))
        for key, value in values_of(tree).items()
    ]
    translated = translate(settings, beside=beside)
    paths = {".".join(path): path for path, _ in leaves(tree)}
    translated_tree: dict[str, object] = {}
    for key, value in translated.values.items():
        *sections, name = paths.get(key, key.split("."))
        place = translated_tree
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            below = place[section]
            if not isinstance(below, dict):
                raise ValueError(f"{section}={below!r}: a section of keys, such as {name}")
            place = below
        place[name] = value
    return translated_tree, list(translated.rows)

"""What verl-omni's keys of the rewards are here: terms of `reward.terms`."""

from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.config.setting import AS_GIVEN, REPLACED, Given, Outcome, Setting, foreign

TERMS = "reward.terms"
_FUNCTION = "reward.custom_reward_function.path"
_FUNCTIONS = "reward.reward_functions"
_SET_HERE = f"rewards are set in {TERMS}"
# The reward that asks the reward model, and where `vllm serve` listens.
_READER = "vlm_ocr"
_URL = "http://127.0.0.1:8000/v1"


def chooses_rewards(given: Given) -> bool:
    """Returns whether settings choose what scores."""
    names = (TERMS, _FUNCTION, f"{_FUNCTIONS}.")
    return any(key.startswith(names) and value is not None for key, value in given.items())


def _file(path: Any) -> str:
    """Returns `genrm_ocr` for `a/b/genrm_ocr.py` and for `pkg://a.b.genrm_ocr`."""
    name = str(path).rsplit("/", 1)[-1]
    return name.removesuffix(".py").rsplit(".", 1)[-1]


def _scorer(path: Any) -> Mapping[str, Any]:
    """Returns the reward here that scores as a file of verl-omni does; empty if there is none."""
    return foreign()["rewards"].get(_file(path), {})


def _paths(given: Given) -> dict[str, Any]:
    """Returns the file of each reward function, by the name that its term has here."""
    several = {
        key.split(".")[2]: path
        for key, path in given.items()
        if key.startswith(f"{_FUNCTIONS}.") and key.endswith(".path")
    }
    path = given.get(_FUNCTION)
    if several or path is None:
        return several
    return {_scorer(path).get("name", _file(path)): path}


def _replaced(given: Given) -> Outcome | None:
    """Returns the outcome of a key whose place the user's own terms take; None without any.

    Options of a translated term refine it, and a term of weight 0 is only logged.
    """
    chosen: dict[str, bool] = {}
    for key, value in given.items():
        if key == TERMS and isinstance(value, Mapping):
            chosen |= {str(name): term is not None for name, term in value.items()}
        elif key.startswith(f"{TERMS}."):
            name, _, option = key.removeprefix(f"{TERMS}.").partition(".")
            chosen[name] = value is not None and not (option == "weight" and value == 0)
    translated = _paths(given)
    own = [f"{TERMS}.{name}" for name in chosen if chosen[name] and name not in translated]
    return Outcome(why=f"{REPLACED} {', '.join(own)}") if own else None


def _term(name: str, path: Any, given: Given) -> Outcome:
    """Returns the term that a reward function is here."""
    key = f"{TERMS}.{name}"
    if given.get(key, ...) is None:
        return Outcome(why=f"dropped by {key}=null")
    scorer = _scorer(path)
    if not scorer:
        known = ", ".join(foreign()["rewards"])
        why = f"{_SET_HERE}, which takes the place of this; only {known} have a counterpart"
        return Outcome(why=why, stops=True)
    found: dict[str, Any] = {}
    if name != "ocr" and f"{TERMS}.ocr" not in given and "ocr" not in _paths(given):
        found[f"{TERMS}.ocr"] = None
    if name != scorer["name"]:
        found[f"{key}._target_"] = scorer["name"]
    if scorer["divisor"] != 1 and f"{_FUNCTIONS}.{name}.weight" not in given:
        found[f"{key}.weight"] = 1 / scorer["divisor"]
    if scorer["name"] != _READER:
        return Outcome(found)
    if f"{key}.url" not in given:
        found[f"{key}.url"] = _URL
    model = given.get("reward.reward_model.model_path", "MODEL")
    return Outcome(
        found,
        f"start its server first, `vllm serve {model}`; without one, {TERMS}.ocr.weight=1 scores "
        "in place of it. The answers are greedy here, sampled there",
    )


def _function(setting: Setting, given: Given) -> Outcome:
    if setting.value is None:
        return Outcome(why="no function")
    replaced = _replaced(given)
    if replaced is not None:
        return replaced
    name, path = next(iter(_paths(given).items()))
    if setting.value != path:
        return Outcome(why=f"{_FUNCTIONS} are given")
    return _term(name, path, given)


def _functions(setting: Setting, given: Given) -> Outcome:
    """One of several functions: `reward.reward_functions.NAME.path`, `.weight` and so on."""
    if setting.key == _FUNCTIONS:
        none = setting.value == {}
        return Outcome(why="none") if none else Outcome(why=_SET_HERE, stops=True)
    replaced = _replaced(given)
    if replaced is not None:
        return replaced
    name, _, option = setting.key.removeprefix(f"{_FUNCTIONS}.").partition(".")
    path = _paths(given).get(name)
    scorer = _scorer(path)
    if option == "path":
        return _term(name, path, given)
    if option in ("name", "required") or (path is not None and not scorer):
        return Outcome(why=f"belongs to {_FUNCTIONS}.{name}.path")
    if option == "weight" and scorer:
        return Outcome({f"{TERMS}.{name}.weight": setting.value * (1 / scorer["divisor"])})
    return Outcome(why=f"set {TERMS}.{name}", stops=True)


def _readers(given: Given) -> list[str]:
    """Returns the terms that ask the reward model."""
    if _replaced(given) is not None:
        return []
    return [name for name, path in _paths(given).items() if _scorer(path).get("name") == _READER]


def _enable(setting: Setting, given: Given) -> Outcome:
    if setting.value is False or _readers(given):
        return Outcome(why=foreign()["verl_omni"]["reward.reward_model"])
    return _replaced(given) or Outcome(why=_SET_HERE, stops=True)


def _model_path(setting: Setting, given: Given) -> Outcome:
    terms = _readers(given)
    if not terms or setting.value is None:
        return Outcome(why="belongs to reward_model.enable")
    return Outcome({f"{TERMS}.{name}.model": AS_GIVEN for name in terms})


# What `rule` names in the table.
REWARD_RULES = {
    "function": _function,
    "functions": _functions,
    "enable": _enable,
    "model_path": _model_path,
}

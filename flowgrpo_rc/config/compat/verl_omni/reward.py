"""verl-omni's keys of the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowgrpo_rc.config.compat.rules import (
    REPLACED,
    Outcome,
    Rule,
    Setting,
    Written,
    each,
    reported,
    stops,
)
from flowgrpo_rc.config.compat.verl_omni.keys import PREFIX

_TERMS = "reward.terms"
_FUNCTION = "reward.custom_reward_function.path"
_FUNCTIONS = "reward.reward_functions"
_MODEL = "reward.reward_model.model_path"
# Keys that choose what scores.
REWARDS = (_TERMS, _FUNCTION, f"{_FUNCTIONS}.")
_REWARD = "rewards are set in reward.terms"
_SERVED = "options of `vllm serve`, which you start"
# Where `vllm serve` listens.
_URL = "http://127.0.0.1:8000/v1"


class _Scorer(NamedTuple):
    """A reward here that scores as a file of verl-omni's `reward_score` does.

    Attributes:
      name: of the reward.
      scale: what its scores are multiplied by there.
    """

    name: str
    scale: float = 1.0


_SCORERS = {
    "genrm_ocr": _Scorer("vlm_ocr"),
    "jpeg_compressibility": _Scorer("jpeg", 1 / 500),
    "pickscore_reward": _Scorer("pickscore", 1 / 26),
}


def _file(path: Any) -> str:
    """Returns `genrm_ocr` for `a/b/genrm_ocr.py` and for `pkg://a.b.genrm_ocr`."""
    name = str(path).rsplit("/", 1)[-1]
    return name.removesuffix(".py").rsplit(".", 1)[-1]


def _paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file of each reward function, by the name that its term has here."""
    several = {
        key.split(".")[2]: path
        for key, path in given.items()
        if key.startswith(f"{_FUNCTIONS}.") and key.endswith(".path")
    }
    path = given.get(_FUNCTION)
    if several or path is None:
        return several
    scorer = _SCORERS.get(_file(path))
    return {scorer.name if scorer else _file(path): path}


def _own_terms(given: Mapping[str, Any]) -> list[str]:
    """Returns the terms that the user has chosen in this project's words.

    Options of a translated term refine it, and a term of weight 0 is only logged.
    """
    names: dict[str, bool] = {}
    for key, value in given.items():
        if key == _TERMS and isinstance(value, Mapping):
            names |= {str(name): term is not None for name, term in value.items()}
        elif key.startswith(f"{_TERMS}."):
            name, _, option = key.removeprefix(f"{_TERMS}.").partition(".")
            dropped = value is None or (option == "weight" and value == 0)
            names[name] = not dropped
    translated = _paths(given)
    return [name for name, chosen in names.items() if chosen and name not in translated]


def _replaced(given: Mapping[str, Any]) -> Outcome | None:
    """Returns the outcome of a key whose place the user's own terms take."""
    own = _own_terms(given)
    if not own:
        return None
    return Outcome(why=f"{REPLACED} {', '.join(f'{_TERMS}.{name}' for name in own)}")


def _term(name: str, path: Any, given: Mapping[str, Any]) -> Outcome:
    """Returns the term that a reward function is here."""
    if given.get(f"{_TERMS}.{name}", ...) is None:
        return Outcome(why=f"dropped by {_TERMS}.{name}=null")
    scorer = _SCORERS.get(_file(path))
    if scorer is None:
        known = ", ".join(_SCORERS)
        why = f"{_REWARD}, which takes the place of this; only {known} have a counterpart"
        return Outcome(why=why, stops=True)
    key = f"{_TERMS}.{name}"
    found: dict[str, Any] = {}
    if name != "ocr" and f"{_TERMS}.ocr" not in given and "ocr" not in _paths(given):
        found[f"{_TERMS}.ocr"] = None
    if name != scorer.name:
        found[f"{key}._target_"] = scorer.name
    if scorer.scale != 1 and f"{_FUNCTIONS}.{name}.weight" not in given:
        found[f"{key}.weight"] = scorer.scale
    if scorer.name != "vlm_ocr":
        return Outcome(found)
    if f"{key}.url" not in given:
        found[f"{key}.url"] = _URL
    model = given.get(_MODEL, "MODEL")
    return Outcome(
        found,
        f"start its server first, `vllm serve {model}`; without one, {_TERMS}.ocr.weight=1 scores "
        "in place of it. The answers are greedy here, sampled there",
    )


def _function(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is None:
        return Outcome(why="no function")
    replaced = _replaced(given)
    if replaced is not None:
        return replaced
    paths = _paths(given)
    if setting.value not in paths.values():
        return Outcome(why=f"{_FUNCTIONS} are given")
    return _term(next(iter(paths)), setting.value, given)


def _functions(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """One of several functions: `reward.reward_functions.NAME.path`, `.weight` and so on."""
    if setting.key == _FUNCTIONS:
        return Outcome(why="none") if setting.value == {} else Outcome(why=_REWARD, stops=True)
    replaced = _replaced(given)
    if replaced is not None:
        return replaced
    name, _, option = setting.key.removeprefix(f"{_FUNCTIONS}.").partition(".")
    path = _paths(given).get(name)
    if option == "path":
        return _term(name, path, given)
    scorer = _SCORERS.get(_file(path))
    if option in ("name", "required") or (path is not None and scorer is None):
        return Outcome(why=f"belongs to {_FUNCTIONS}.{name}.path")
    if option == "weight" and scorer is not None:
        return Outcome({f"{_TERMS}.{name}.weight": setting.value * scorer.scale})
    return Outcome(why=f"set {_TERMS}.{name}", stops=True)


def _readers(given: Mapping[str, Any]) -> list[str]:
    """Returns the terms that ask the reward model."""
    if _own_terms(given):
        return []
    paths = _paths(given).items()
    return [name for name, path in paths if _SCORERS.get(_file(path)) == _SCORERS["genrm_ocr"]]


def _enable(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    if setting.value is False or _readers(given):
        return Outcome(why=_SERVED)
    return _replaced(given) or Outcome(why=_REWARD, stops=True)


def _model_path(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    terms = _readers(given)
    if not terms or setting.value is None:
        return Outcome(why="belongs to reward_model.enable")
    return Outcome({f"{_TERMS}.{name}.model": Written(setting.text) for name in terms})


def _workers(setting: Setting, given: Mapping[str, Any]) -> Outcome:
    """verl-omni counts processes under this name; here it is rewards scored at the same time."""
    if any(key.startswith(PREFIX) for key in given):
        return Outcome(why="reward processes; here a reward is one thread")
    return Outcome({setting.key: Written(setting.text)})


REWARD_RULES: dict[str, Rule] = {
    "reward.num_workers": _workers,
    "reward.custom_reward_function": reported("belongs to custom_reward_function.path"),
    _FUNCTION: _function,
    _FUNCTIONS: _functions,
    "reward.models": stops(_REWARD, unless=[{}]),
    "reward.aggregation": stops("rewards add up by weight", unless=["weighted_sum"]),
    "reward.reward_model": reported(_SERVED),
    "reward.reward_model.enable": _enable,
    _MODEL: _model_path,
    **each(
        "reward",
        "reward_manager reward_kwargs sandbox_fusion accelerator_workers",
        reported(_REWARD),
    ),
}

"""A plain function as a reward, for what needs no class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import load_function
from flowgrpo_rc.rewards.base import Reward, Scores

# Returns a number, or None for a sample that it cannot score.
Score = Callable[[Any, Prompt], Any]
GIVEN = "given:"
_given: dict[str, Score] = {}


class Function(Reward):
    """The number that `score(sample, prompt)` returns for each sample and its `Prompt`.

    A sample is a uint8 image [H, W, 3], a uint8 video [F, H, W, 3] or a text; with kind=latent it
    is the tensor that would be decoded. A sample whose number is None or not finite has no reward.
    If the function raises, the whole chunk of samples has none.

    Args:
      path: `my_package.my_module:score`; the module is imported at once. Or `given:NAME` for what
        `give` took.
      kind: "image", "video", "text" or "latent" for a function that scores nothing else.
    """

    def __init__(self, *, path: str, kind: str = "any") -> None:
        self.kind = kind
        self._score: Score = _given_at(path) if path.startswith(GIVEN) else load_function(path)
        _check_parameters(self._score, path)

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        return Scores(values=[self._score(*pair) for pair in zip(samples, prompts, strict=True)])


def give(name: str, score: Score) -> str:
    """Makes a function of this Python session a reward, and returns its path for `Function`.

    A function of a module is found there again by every process. Any other one, such as that of a
    notebook's cell, is kept for this session alone.
    """
    if not callable(score):
        raise ValueError(f"rewards[{name!r}]={score!r} is no function (sample, prompt) -> number")
    if (
        isinstance(score, FunctionType)
        and score.__module__ not in ("__main__", None)
        and vars(sys.modules[score.__module__]).get(score.__name__) is score
    ):
        return f"{score.__module__}:{score.__name__}"
    _given[name] = score
    return f"{GIVEN}{name}"


def _given_at(path: str) -> Score:
    name = path.removeprefix(GIVEN)
    if name not in _given:
        raise ValueError(
            f"path={path!r}: this reward is a function of the Python session that started the run; "
            f"call flowgrpo_rc.train or Run.resume with rewards={{{name!r}: the function}}"
        )
    return _given[name]


def _check_parameters(score: Callable[..., Any], path: str) -> None:
    try:
        parameters = inspect.signature(score)
    except ValueError:  # functions in C need not have a signature
        return
    try:
        parameters.bind("sample", "prompt")
    except TypeError as error:
        raise ValueError(
            f"path={path!r} takes {parameters}, and is called with a sample and its prompt: {error}"
        ) from error

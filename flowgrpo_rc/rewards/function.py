"""A plain function as a reward, for what needs no class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import load_function
from flowgrpo_rc.rewards.base import Reward, Scores


class Function(Reward):
    """The number that `score(sample, prompt)` returns for each sample and its `Prompt`.

    A sample is a uint8 image [H, W, 3], a uint8 video [F, H, W, 3] or a text; with kind=latent it
    is the tensor that would be decoded. A sample whose number is None or not finite has no reward.
    If the function raises, the whole chunk of samples has none.

    Args:
      path: `my_package.my_module:score`; the module is imported at once.
      kind: "image", "video", "text" or "latent" for a function that scores nothing else.

    Raises:
      ValueError: `path` leads to no function, or to one that does not take a sample and a prompt.
    """

    def __init__(self, *, path: str, kind: str = "any") -> None:
        self.kind = kind
        self._score: Callable[[Any, Prompt], float] = load_function(path)
        _check_parameters(self._score, path)

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> Scores:
        return Scores(
            values=[
                self._score(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)
            ]
        )


def _check_parameters(score: Callable[..., Any], path: str) -> None:
    """Raises ValueError for a function that cannot be called as score(sample, prompt)."""
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

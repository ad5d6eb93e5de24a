"""A vision-language model: it is shown pictures, asked a question, and answers in words."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowgrpo_rc.rewards.http.client import ServerError


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about pictures."""

    pictures: Sequence[np.ndarray]  # uint8 RGB, [H, W, 3] each, in the order of the model's view
    text: str  # stands behind the pictures
    turns: tuple[tuple[str, str], ...] = ()  # what was said since: an answer and the reply to it


class Answer(NamedTuple):
    """Holds what a model said."""

    text: str
    is_cut: bool  # by the limit of its length


class Vlm(ABC):
    """A vision-language model. It always takes the likeliest word, so that answers repeat."""

    def check(self) -> None:  # noqa: B027 - a server is asked when the first samples are there
        """Raises ValueError if its files cannot be had. It is called before anything is loaded."""

    @abstractmethod
    def answer(self, questions: Sequence[Question]) -> list[Answer | ServerError]:
        """Returns the answer to each of N questions, or why it has none."""

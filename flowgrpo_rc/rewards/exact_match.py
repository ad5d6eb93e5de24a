"""A reward for a response that equals the target: the plainest verifiable reward."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores, target_of


class ExactMatch(Reward):
    """1 if the response equals the prompt's target, else 0.

    The part `contains` is 1 if the target occurs in the response.

    Args:
      ignore_case: compare without regard to case.
      strip: first remove white space around the response and the target.
    """

    kind = "text"
    part_names = ("contains",)
    requires_target = True

    def __init__(self, *, ignore_case: bool = False, strip: bool = True) -> None:
        self.ignore_case = ignore_case
        self.strip = strip

    def __call__(self, samples: Sequence[str], prompts: Sequence[Prompt]) -> Scores:
        pairs = [
            (self._normalize(text), self._normalize(target_of(prompt)))
            for text, prompt in zip(samples, prompts, strict=True)
        ]
        return Scores(
            values=[float(text == target) for text, target in pairs],
            parts={"contains": [float(target in text) for text, target in pairs]},
        )

    def _normalize(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text

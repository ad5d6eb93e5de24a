"""A reward for a response that equals the target: the plainest verifiable reward."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores, target_of


@dataclass(kw_only=True, eq=False)
class ExactMatch(Reward):
    """1 if the response equals the prompt's target, else 0.

    The part `contains` is 1 if the target occurs in the response.
    """

    kind = "text"
    part_names = ("contains",)
    requires_target = True

    ignore_case: bool = False
    strip: bool = True  # first remove white space around the response and the target

    def __call__(self, samples: Sequence[str], prompts: Sequence[Prompt]) -> Scores:
        texts = map(self._normalize, samples)
        targets = [self._normalize(target_of(prompt)) for prompt in prompts]
        pairs = [*zip(texts, targets, strict=True)]
        return Scores(
            values=[float(text == target) for text, target in pairs],
            parts={"contains": [float(target in text) for text, target in pairs]},
        )

    def _normalize(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text

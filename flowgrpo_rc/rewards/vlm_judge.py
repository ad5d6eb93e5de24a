"""A reward for what a vision-language model answers to a question about an image or a video."""

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.pictures import read_picture
from flowgrpo_rc.plugins import check_choice
from flowgrpo_rc.rewards.base import Scores, check_range
from flowgrpo_rc.rewards.vlm.judge import AsksVlm, Judge, failure_of
from flowgrpo_rc.rewards.vlm.models import Question

QUESTION = (
    'This was made for the prompt "{prompt}". How well does it show what the prompt says, and how '
    "good does it look? Answer with one number from {low} (not at all) to {high} (perfectly), and "
    "with nothing else."
)
NAMES = ("prompt", "target", "low", "high")  # that may stand in a question, in braces
KINDS = ("image", "video")
EVERY = 8  # distance between the frames of a video that are shown


class VlmJudge(AsksVlm):
    """The number in a model's answer, from 0 (`low`) to 1 (`high`).

    A sample whose answer holds no such number has no score. The part `unanswered` is 1 for it, and
    `repeats` says how often a question was asked again.

    Args:
      question: what is asked, with {prompt}, {target}, {low} and {high} where they should stand.
      low: the number that stands for 0.
      high: the number that stands for 1.
      parse: where in an answer the number is: `number` (the last one), `regex:PATTERN` (its group)
        or `json:KEY`.
      attempts: how often a question is asked at most, if its answer cannot be read.
      kind: image or video.
      every: distance between the frames of a video that are shown; null: 8.
      source: show the images of the prompt first, such as the one that was edited.
      vlm: `url`, `model` and the other options of `VlmServer`, or `path` and those of `LocalVlm`.
    """

    part_names = ("unanswered", "repeats")

    def __init__(
        self,
        *,
        question: str = QUESTION,
        low: float = 0.0,
        high: float = 10.0,
        parse: str = "number",
        attempts: int = 2,
        kind: str = "image",
        every: int | None = None,
        source: bool = False,
        **vlm: object,
    ) -> None:
        check_choice("kind", kind, KINDS)
        if kind == "image" and every is not None:
            raise ValueError(f"{every=} is for videos: give kind=video, or leave it out")
        self.kind = kind
        self.requires_images = source
        self.requires_target = "{target}" in question
        self._every = EVERY if every is None else every
        check_range(1, every=self._every)
        self._low = low
        self._high = high
        super().__init__(vlm)
        self._judge = Judge(
            self._vlm, question, NAMES, parse=parse, low=low, high=high, attempts=attempts
        )

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        questions = [
            Question(pictures=self._pictures(sample, prompt), text=self._judge.text(prompt))
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        verdicts = self._judge.ask(questions)
        scale = self._high - self._low
        return Scores(
            values=[(verdict.number - self._low) / scale for verdict in verdicts],
            parts={
                "unanswered": [float(bool(verdict.failure)) for verdict in verdicts],
                "repeats": [float(verdict.repeats) for verdict in verdicts],
            },
            failure=failure_of(verdicts),
        )

    def _pictures(self, sample: np.ndarray, prompt: Prompt) -> list[np.ndarray]:
        images = prompt.images if self.requires_images else ()
        frames = [sample] if self.kind == "image" else list(sample[:: self._every])
        return [*map(read_picture, images), *frames]

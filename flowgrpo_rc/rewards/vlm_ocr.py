"""A reward for how well a vision-language model reads the target text in an image.

It reads text that the small models of `ocr` cannot. The model answers at an OpenAI-compatible
endpoint, for instance `vllm serve Qwen/Qwen2.5-VL-7B-Instruct`, or is one of this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.ocr import OCR, ocr_score, target_of
from flowgrpo_rc.rewards.vlm.base import Question, VlmError
from flowgrpo_rc.rewards.vlm.find import make_vlm

INSTRUCTION = (
    "Write down the text in this image exactly as it stands there, mistakes included. Answer with "
    "that text alone, and with nothing if there is no text."
)


class VlmOCR(Reward):
    """The `ocr_score` of what the model reads, with the parts of the `ocr` reward.

    An image without an answer has no score.

    Args:
      instruction: what the model is told to do.
      vlm: `url`, `model` and the other options of `VlmServer`, or `path` and those of `LocalVlm`.

    Raises:
      ValueError: no model is named, or its class refuses an option. When called: a prompt has no
        target.
      VlmError: when called, no image has an answer.
    """

    part_names = OCR.part_names
    requires_target = True

    def __init__(self, *, instruction: str = INSTRUCTION, **vlm: Any) -> None:
        self._instruction = instruction
        self._vlm = make_vlm(vlm)

    def check(self) -> None:
        """Raises ValueError if the server cannot be reached, or serves other models."""
        self._vlm.check()

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        targets = [target_of(prompt) for prompt in prompts]
        answers = self._vlm.answer(
            [Question(pictures=[image], text=self._instruction) for image in samples]
        )
        failures = [answer for answer in answers if isinstance(answer, VlmError)]
        if len(failures) == len(answers):
            raise failures[0]
        columns: dict[str, list[float]] = {name: [] for name in ("reward", *self.part_names)}
        for answer, target in zip(answers, targets, strict=True):
            score = None
            if not isinstance(answer, VlmError):
                # An answer of several lines is one text, as that of `ocr` is.
                score = ocr_score("".join(answer.text.split()), target)
            for name, column in columns.items():
                column.append(math.nan if score is None else getattr(score, name))
        failure = ""
        if failures:
            failure = f"{len(failures)} of {len(answers)} images have no answer: {failures[0]}"
        return Scores(values=columns.pop("reward"), parts=columns, failure=failure)

"""A reward for how well a vision-language model reads the target text in an image.

It reads text that the small models of `ocr` cannot. The model answers at an OpenAI-compatible
endpoint, for instance `vllm serve Qwen/Qwen2.5-VL-7B-Instruct`, or is one of this process.
"""

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Scores, target_of
from flowgrpo_rc.rewards.http.client import ServerError
from flowgrpo_rc.rewards.ocr import OCR, ocr_scores
from flowgrpo_rc.rewards.vlm.judge import AsksVlm
from flowgrpo_rc.rewards.vlm.models import Question

INSTRUCTION = (
    "Write down the text in this image exactly as it stands there, mistakes included. Answer with "
    "that text alone, and with nothing if there is no text."
)


class VlmOCR(AsksVlm):
    """The `ocr_score` of what the model reads, with the parts of the `ocr` reward.

    An image without an answer has no score.

    Args:
      instruction: what the model is told to do.
      vlm: `url`, `model` and the other options of `VlmServer`, or `path` and those of `LocalVlm`.
    """

    part_names = OCR.part_names
    requires_target = True

    def __init__(self, *, instruction: str = INSTRUCTION, **vlm: object) -> None:
        super().__init__(vlm)
        self._instruction = instruction

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the target has a break, since none is left in what is read."""
        target = target_of(prompt)
        if len(target.replace(" ", "").split()) > 1:
            raise ValueError(f"no image can score 1: write a space for the break in {target!r}")

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        for prompt in prompts:  # before the model is asked
            target_of(prompt)
        questions = [Question(pictures=[image], text=self._instruction) for image in samples]
        answers = self._vlm.answer(questions)
        # Several lines are one text, as with `ocr`.
        texts = [
            None if isinstance(answer, ServerError) else "".join(answer.text.split())
            for answer in answers
        ]
        failures = [answer for answer in answers if isinstance(answer, ServerError)]
        failure = ""
        if failures:
            failure = f"{len(failures)} of {len(texts)} images have no answer: {failures[0]}"
        return ocr_scores(texts, prompts, failure=failure)

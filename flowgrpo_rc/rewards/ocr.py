"""How well an OCR model reads the target text in an image: the text-rendering reward of Flow-GRPO.

Reference: https://arxiv.org/abs/2505.05470. The text is read by the PP-OCRv4 models that ship in
the wheel of rapidocr-onnxruntime, so nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from rapidfuzz.distance import Levenshtein

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores

if TYPE_CHECKING:
    from rapidocr_onnxruntime import RapidOCR
    from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer

DETECTION = ("auto", "always", "never")
LINE_HEIGHT = (
    48  # pixels, the recogniser's own; "auto" takes an image up to this height for one line of text
)
MIN_LINE_WIDTH = 96  # pixels at the recogniser's height of 48; narrower input loses letters


@dataclass(frozen=True, kw_only=True, slots=True)
class OcrScore:
    """reward: 1 - d / len(target); edit: the same without the substring rule; substring, exact: 0
    or 1.
    """

    reward: float
    edit: float
    substring: float
    exact: float


def ocr_score(text: str, target: str) -> OcrScore:
    """Compare recognised text with its target; both lose their spaces and their case.

    d = 0 if the target occurs in the text, else min(Levenshtein distance, len(target)); reward = 1
    - d / len(target). The substring rule also rewards gibberish around the target, hence the three
    further numbers. Raises ValueError if nothing is left of the target.
    """
    text = _normalize(text)
    target = _normalize(target)
    if not target:
        raise ValueError("ocr_score: the target text is empty")
    edit = 1.0 - min(Levenshtein.distance(text, target), len(target)) / len(target)
    substring = target in text
    return OcrScore(
        reward=1.0 if substring else edit,
        edit=edit,
        substring=float(substring),
        exact=float(text == target),
    )


class OCR(Reward):
    """Reads every image and compares the text with the prompt's target.

    detection: "never" takes an image for one line of text (recognition alone, in batches); "always"
        finds the lines first and joins what they say, top to bottom; "auto" decides by the height,
        48 pixels or less being a line.
    threads: CPU threads of the OCR models, at most the number of cores.
    batch_size: lines recognised at once. On two cores a 32 x 64 line takes 5 ms with the defaults,
        busy or idle; with two threads and batches of 8 it takes 3 ms while nothing else runs and
        more than 10 next to the sampling.

    Raises ValueError for an unknown detection or a number below 1, ImportError if
    rapidocr-onnxruntime is missing and, when called, ValueError for a prompt without a target.
    """

    part_names = ("edit", "substring", "exact")
    requires_target = True

    def __init__(self, *, detection: str = "auto", threads: int = 1, batch_size: int = 1) -> None:
        if detection not in DETECTION:
            raise ValueError(f"detection={detection!r} is not one of {', '.join(DETECTION)}")
        for name, value in (("threads", threads), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        if find_spec("rapidocr_onnxruntime") is None:
            raise ImportError(
                "the ocr reward needs rapidocr-onnxruntime: pip install "
                "'rapidocr-onnxruntime==1.4.4'"
            )
        self.detection = detection
        self.threads = min(threads, os.cpu_count() or 1)
        self.batch_size = batch_size

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        targets = [target_of(prompt) for prompt in prompts]
        scores = [
            ocr_score(text, target)
            for text, target in zip(self.read(samples), targets, strict=True)
        ]
        return Scores(
            values=[score.reward for score in scores],
            parts={
                "edit": [score.edit for score in scores],
                "substring": [score.substring for score in scores],
                "exact": [score.exact for score in scores],
            },
        )

    def read(self, images: np.ndarray) -> list[str]:
        """The text in each of images [N, H, W, 3] uint8 RGB, "" where there is none."""
        bgr = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
        is_line = self.detection == "never" or (
            self.detection == "auto" and images.shape[1] <= LINE_HEIGHT
        )
        if is_line:
            return [text for text, _ in self._line_reader(bgr)[0]]
        return [_join(self._page_reader(image)[0]) for image in bgr]

    @cached_property
    def _line_reader(self) -> TextRecognizer:
        """The recogniser alone. The stock width of 320 pads short lines and makes them four times
        slower.
        """
        from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer
        from rapidocr_onnxruntime.main import DEFAULT_CFG_PATH, read_yaml, update_model_path

        config = update_model_path(read_yaml(DEFAULT_CFG_PATH))["Rec"]
        channels, height, _ = config["rec_img_shape"]
        shape = [channels, height, MIN_LINE_WIDTH]
        return TextRecognizer(
            config
            | {
                "rec_img_shape": shape,
                "rec_batch_num": self.batch_size,
                "intra_op_num_threads": self.threads,
                "inter_op_num_threads": 1,
            }
        )

    @cached_property
    def _page_reader(self) -> RapidOCR:
        """Detection, then recognition. `max` leaves the image at its size; the stock `min` enlarges
        it to 736.
        """
        from rapidocr_onnxruntime import RapidOCR

        return RapidOCR(
            use_cls=False,
            det_limit_type="max",
            rec_batch_num=self.batch_size,
            intra_op_num_threads=self.threads,
            inter_op_num_threads=1,
        )


def _normalize(text: str) -> str:
    return text.replace(" ", "").lower()


def target_of(prompt: Prompt) -> str:
    """The text to read. ValueError if there is none."""
    if prompt.target is None or not _normalize(prompt.target):
        raise ValueError(
            f"reading needs a target text, and prompt {prompt.index} ({prompt.text!r}) has "
            f'{prompt.target!r}: put the text between double quotes, or give the key "target"'
        )
    return prompt.target


def _join(lines: list[list] | None) -> str:
    """RapidOCR's result, a list of [box, text, confidence] in reading order or None, as one
    text.
    """
    return "".join(text for _, text, _ in lines or [])

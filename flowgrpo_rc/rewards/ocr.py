"""A reward for how well an OCR model reads the target text in an image, as Flow-GRPO defines it.

Shapes: N images, H x W pixels.

Reference: https://arxiv.org/abs/2505.05470. The PP-OCRv4 models that read the text ship in the
wheel of rapidocr, so nothing is downloaded. From 3.9 on it ships other models, whose scores differ.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import check_choice, install_hint
from flowgrpo_rc.rewards.base import Reward, Scores, check_range, target_of

if TYPE_CHECKING:
    from rapidocr import RapidOCR

ENGINES = ("auto", "onnxruntime", "openvino")
DETECTION = ("auto", "always", "never", "narrow")
# Pixels, the recogniser's own height; "auto" takes an image up to it for one line of text.
LINE_HEIGHT = 48
# Channels, height and least width of a line. Narrower input loses letters; the stock width of 320
# pads short lines and makes them four times slower.
_LINE_SHAPE = [3, LINE_HEIGHT, 96]
PARTS = ("edit", "substring", "exact")  # of OcrScore, in its order

# Marks that a reader takes for one. Other forms, such as full width, are known to Unicode.
_MARKS = {
    "'": "‘’‚‛′´ʼ",
    '"': "“”„‟″〝〞",
    "-": "‐‑‒–—―−",
    "~": "〜∼",
    ":": "∶",
    "/": "⁄∕",
    "|": "∣",
    "·": "•‧・⋅",
    "": "\ufe0e\ufe0f",  # of an emoji, whether it has colour
}
_MARK_OF = {form: mark for mark, forms in _MARKS.items() for form in forms}
_OTHER_LETTERS = ("<circle>", "<super>", "<sub>", "<fraction>")  # a reader sees that ① is not 1


class OcrScore(NamedTuple):
    """The scores of one recognised text, each from 0 to 1."""

    reward: float  # 1 if the target occurs in the text, else `edit`
    edit: float  # 1 - edit distance / length of the target, at least 0
    substring: float  # 1 if the target occurs in the text, else 0
    exact: float  # 1 if the text equals the target, else 0


def ocr_score(text: str, target: str) -> OcrScore:
    """Compares recognised text with its target, both as `as_read` has them.

        reward = 1 - d / len(target)
        d = 0 if the target occurs in the text, else min(Levenshtein distance, len(target))

    The substring rule also rewards gibberish around the target. The other three scores show that.
    The target is not blank.
    """
    text = as_read(text)
    target = as_read(target)
    edit = 1.0 - min(Levenshtein.distance(text, target), len(target)) / len(target)
    substring = target in text
    return OcrScore(1.0 if substring else edit, edit, float(substring), float(text == target))


def as_read(text: str) -> str:
    """Returns a text without what a reader does not tell apart: spaces, case, forms of a letter.

    Full and half width, ligatures, kinds of quotes and dashes, and accents that stand alone are
    forms. Of plain ASCII, only the spaces and the case go.
    """
    if not text.isascii():
        text = "".join(map(_plain, text))
        text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    return text.replace(" ", "").lower()


def _plain(letter: str) -> str:
    """Returns the plain form of a letter, of one or several; none of a space or what is unseen."""
    if letter in _MARK_OF or unicodedata.category(letter) in ("Zs", "Cf"):
        return _MARK_OF.get(letter, "")
    kind, *codes = unicodedata.decomposition(letter).split() or [""]
    if not kind.startswith("<") or kind in _OTHER_LETTERS or codes[0] == "0020":
        return letter
    return "".join(_plain(chr(int(code, 16))) for code in codes)


def ocr_scores(
    texts: Sequence[str | None], prompts: Sequence[Prompt], *, failure: str = ""
) -> Scores:
    """Returns the `ocr_score` of what was read for each prompt; NaN where nothing was, None."""
    nothing = OcrScore(*[math.nan] * 4)
    rows = [
        nothing if text is None else ocr_score(text, target_of(prompt))
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    values, *columns = map(list, zip(*rows, strict=True))
    return Scores(values=values, parts=dict(zip(PARTS, columns, strict=True)), failure=failure)


@dataclass(kw_only=True, eq=False)
class OCR(Reward):
    """The `ocr_score` of each image: reads its text and compares it with the prompt's target.

    `detection=never` takes an image for one line of text, which is recognised at once; `always`
    finds the lines first and joins them from top to bottom; `narrow` does so too, but pads short
    lines to a width of 96 in place of 320, which takes half the time on small images; `auto` is
    `never` for images of at most 48 pixels in height, else `always`.

    `engine=auto` is OpenVINO in a run that begins where it is installed, else onnxruntime.

    On two cores a 32 x 64 line takes 5 ms with the defaults, busy or idle. With two threads and
    batches of 8 it takes 3 ms on an idle machine, and more than 10 ms during sampling.
    """

    part_names = PARTS
    requires_target = True

    engine: str = "auto"  # what runs the models, in fp32 and with the same texts
    detection: str = "auto"
    threads: int = 1  # of the OCR models on the CPU, at most the number of cores
    batch_size: int = 1  # lines recognised at once

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        check_choice("detection", self.detection, DETECTION)
        check_range(1, threads=self.threads, batch_size=self.batch_size)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        return ocr_scores(self.read(samples), prompts)

    def settle(self, earlier: Mapping[str, object]) -> Mapping[str, object]:
        """Chooses the engine if it is left open: OpenVINO where it is installed."""
        if self.engine != "auto":
            return {}
        installed = "onnxruntime" if find_spec("openvino") is None else "openvino"
        self.engine = str(earlier.get("engine", installed))
        return {"engine": self.engine}

    def check(self) -> None:
        """Raises ValueError if rapidocr, or a library of the system that it needs, is missing."""
        try:
            import_module("rapidocr")
        except ImportError as error:
            remedy = "Install it: pip install 'rapidocr==3.8.*' onnxruntime"
            if ".so" in str(error):  # OpenCV's wheel takes libGL and GLib from the system
                remedy = (
                    "On Debian and Ubuntu: apt-get install libgl1 libglib2.0-0. Where that cannot "
                    "be: pip uninstall opencv-python, then pip install opencv-python-headless"
                )
            raise ValueError(f"the OCR engine rapidocr cannot start: {error}. {remedy}") from error
        if self.engine == "openvino" and find_spec("openvino") is None:
            raise ValueError(
                f"engine=openvino: it is not installed: {install_hint('openvino')}, or begin a "
                "run with engine=onnxruntime"
            )

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the target has a letter that the reader cannot write."""
        target = target_of(prompt)
        if target.isascii() and target.isprintable():
            return  # the reader knows all of these
        self.check()
        missing = set(as_read(target)) - self._letters
        if missing:
            letters = ", ".join(map(repr, sorted(missing)))
            raise ValueError(
                f"no image can score 1, since the OCR reader cannot write {letters} of the target "
                f"{target!r}: change the target, leave the prompt out, or read with vlm_ocr"
            )

    def read(self, images: np.ndarray) -> list[str]:
        """Returns the text in each of N images [N, H, W, 3] uint8 RGB; "" if there is none."""
        # RapidOCR expects the channels in OpenCV's order, blue first.
        bgr = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
        is_line = self.detection == "auto" and images.shape[1] <= LINE_HEIGHT
        if is_line or self.detection == "never":
            from rapidocr.ch_ppocr_rec import TextRecInput

            return list(self._line_reader.text_rec(TextRecInput(img=bgr)).txts)
        return ["".join(self._page_reader(image).txts or ()) for image in bgr]

    @cached_property
    def _letters(self) -> set[str]:
        """The letters that the reader's ONNX file lists, as `as_read` has them."""
        return set(as_read("".join(self._line_reader.text_rec.session.get_character_list())))

    @cached_property
    def _line_reader(self) -> RapidOCR:
        return self._reader({"Rec.rec_img_shape": _LINE_SHAPE})

    @cached_property
    def _page_reader(self) -> RapidOCR:
        # "max" keeps an image at its size; the stock "min" enlarges it to 736.
        settings: dict[str, Any] = {"Global.use_cls": False, "Det.limit_type": "max"}
        if self.detection == "narrow":
            settings["Rec.rec_img_shape"] = _LINE_SHAPE
        return self._reader(settings)

    def _reader(self, settings: dict[str, Any]) -> RapidOCR:
        from rapidocr import EngineType, RapidOCR

        openvino = self.engine == "openvino"
        engine = EngineType.OPENVINO if openvino else EngineType.ONNXRUNTIME
        num_threads = min(self.threads, os.cpu_count() or 1)
        common = {
            "Global.log_level": "warning",
            "Rec.rec_batch_num": self.batch_size,
            "Det.engine_type": engine,
            "Rec.engine_type": engine,
            "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        reader = RapidOCR(params=common | settings)
        if openvino:
            for model in (reader.text_det, reader.text_rec):
                compile_in_fp32(model.session, num_threads)
        return reader


def compile_in_fp32(session: Any, num_threads: int) -> None:
    """Compiles the model of a session of rapidocr's OpenVINO engine anew, in fp32.

    The engine cannot be told a precision. Its default is bf16 where the CPU has that, which reads
    other texts.
    """
    from openvino import Core

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # processes of a run would share the first core
    }
    session.session = Core().compile_model(session.model, "CPU", settings).create_infer_request()

"""The OCR reward: its formula by hand, its reading against text drawn by Pillow."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from rapidocr import RapidOCR

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards import ocr
from flowgrpo_rc.rewards.ocr import OCR, ocr_score
from flowgrpo_rc.rewards.video_ocr import VideoOCR
from flowgrpo_rc.rewards.vlm_ocr import VlmOCR

# Each loads its reader once.
LINES = OCR()
VIDEOS = VideoOCR()


def draw(
    text: str, *, width: int = 64, height: int = 32, size: int = 20, ink="navy", paper="white"
) -> np.ndarray:
    """Draws text, of several lines if it has breaks, in the middle of an image."""
    image = Image.new("RGB", (width, height), paper)
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text(
        (width / 2, height / 2), text, font=font, fill=ink, anchor="mm", align="center"
    )
    return np.asarray(image)


def prompt(target: str | None, index: int = 0) -> Prompt:
    return Prompt(text=f'a sign that says "{target}"', index=index, target=target)


@pytest.mark.parametrize(
    ("text", "target", "reward", "edit", "substring", "exact"),
    [
        ("CAFE", "CAFE", 1.0, 1.0, 1.0, 1.0),
        ("c a f e", "CAFE", 1.0, 1.0, 1.0, 1.0),  # spaces and case do not count
        ("New York", "newyork", 1.0, 1.0, 1.0, 1.0),
        ("CAFF", "CAFE", 0.75, 0.75, 0.0, 0.0),  # one substitution of four
        ("CAF", "CAFE", 0.75, 0.75, 0.0, 0.0),  # one deletion
        ("CXAFE", "CAFE", 0.75, 0.75, 0.0, 0.0),  # one insertion
        ("THECAFE", "CAFE", 1.0, 0.25, 1.0, 0.0),  # three insertions, but the word is there
        ("XXCAFEXX", "CAFE", 1.0, 0.0, 1.0, 0.0),
        ("", "CAFE", 0.0, 0.0, 0.0, 0.0),
        ("somethingquiteelse", "abc", 0.0, 0.0, 0.0, 0.0),  # the distance is cut at the length
        ("kitten", "sitting", 4 / 7, 4 / 7, 0.0, 0.0),  # the textbook distance, 3
    ],
)
def test_score_by_hand(text, target, reward, edit, substring, exact):
    score = ocr_score(text, target)
    assert (score.substring, score.exact) == (substring, exact)
    assert score.reward == pytest.approx(reward)
    assert score.edit == pytest.approx(edit)


SAME = [
    ("ＯＰＥＮ２４！", "open24!"),
    ("2：1–50％", "2:1-50%"),
    ("caf\u0065\u0301", "CAFÉ"),
    ("“it’s”", '"it\'s"'),
    ("wait…", "wait..."),
    ("oﬃce", "OFFICE"),
    ("ﾊﾟﾝ", "パン"),
    ("New\u00a0York\u3000City", "newyork city"),
    ("so\u00adft\u200b", "soft"),
    ("I\ufe0f❤\ufe0fNY", "i ❤ ny"),
    ("Ⅳ№㎏", "IVNokg"),
    ("𝐇𝐈", "hi"),
]
OTHER = [
    ("①", "1"),
    ("m²", "m2"),
    ("HELLO?", "HELLO!"),
    ("cafe", "café"),
    ("Straße", "strasse"),
    ("A\tB", "AB"),  # of ASCII, only spaces go
]


@pytest.mark.parametrize(("text", "target"), SAME)
def test_forms_of_one_text_are_equal(text, target):
    assert ocr_score(text, target) == ocr_score(target, text) == (1.0, 1.0, 1.0, 1.0)
    assert ocr_score(f"x{text}", target).substring == 1.0


def test_letters_that_a_reader_tells_apart_differ():
    assert [ocr_score(*pair).exact for pair in OTHER] == [0.0] * len(OTHER)


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("ЖУК", "'ж', 'к', 'у'"),
        ("AÑO", "'ñ'"),
        ("Straße", "'ß'"),
        ("5 €", "'€'"),
        ("カナ", "'カ', 'ナ'"),
        ("HAPPY\nDAY", r"'\\n'"),
    ],
)
def test_a_target_beyond_the_alphabet_of_the_reader_is_refused(target, missing):
    for reward in (LINES, VIDEOS):
        with pytest.raises(ValueError, match=rf"cannot write {missing} of the target .*vlm_ocr"):
            reward.check_prompt(prompt(target))


def test_targets_that_the_reader_can_write():
    # All of ASCII, and forms of it.
    for target in ("Café – “2：1” №5 你好", "\u00a0".join(map(chr, range(33, 127))), "❤\ufe0f ﬁ"):
        LINES.check_prompt(prompt(target))


def test_a_vlm_writes_all_letters_and_no_breaks():
    reward = VlmOCR(url="http://127.0.0.1:1", model="m")
    reward.check_prompt(prompt("Straße  5 €"))
    for target in ("HAPPY\nDAY", "A\tB", "A\u2028B"):
        with pytest.raises(ValueError, match="write a space for the break in"):
            reward.check_prompt(prompt(target))


def faint(count: int, spread: int, **options: int) -> np.ndarray:
    """Draws a word near the limit of legibility."""
    rng = np.random.default_rng(0)
    inks = rng.integers(0, 256, (count, 3))
    papers = np.clip(inks + rng.integers(-spread, spread + 1, (count, 3)), 0, 255)
    colours = zip(inks, papers, strict=True)
    return np.stack([draw("KBCA", ink=tuple(i), paper=tuple(p), **options) for i, p in colours])


def test_reads_faint_colours_as_the_library_does_from_a_file():
    """The order of the colour channels changes what is read."""
    images = faint(24, 20)
    plain = {"Global.use_det": False, "Global.use_cls": False, "Global.log_level": "warning"}
    library = RapidOCR(params=plain | {"Rec.rec_img_shape": [3, 48, 96]})
    expected = [library(Image.fromarray(image)).txts[0] for image in images]
    assert LINES.read(images) == expected
    assert OCR(batch_size=3).read(images[:6]) == expected[:6]
    assert LINES.read(images[..., ::-1]) != expected


@pytest.mark.skipif(find_spec("openvino") is None, reason="needs the extra `openvino`")
@pytest.mark.parametrize("height", [32, 64])
def test_openvino_reads_the_same_texts_in_fp32(height):
    images = faint(24, 25, height=height)
    reward = OCR(engine="openvino", batch_size=2)
    assert reward.read(images) == OCR(engine="onnxruntime", batch_size=2).read(images)
    reader = reward._line_reader if height == 32 else reward._page_reader
    compiled = reader.text_rec.session.session.get_compiled_model()
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


@pytest.mark.parametrize("reward_class", [OCR, VideoOCR])
def test_an_engine_that_is_missing_is_told_before_anything_is_read(monkeypatch, reward_class):
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"engine=openvino: .* pip install .*, or begin a run"):
        reward_class(engine="openvino").check()
    reward_class(engine="onnxruntime").check()
    reward_class().check()
    with pytest.raises(ValueError, match="engine='ov': allowed are auto, onnxruntime, openvino"):
        reward_class(engine="ov")


def test_narrow_lines_read_like_wide_ones():
    pages = np.stack([draw(word, width=128, height=128, size=28) for word in ("5WSJ", "MUSEUM")])
    assert OCR(detection="narrow").read(pages) == LINES.read(pages) == ["5WSJ", "MUSEUM"]


def test_small_text_in_a_large_image_needs_detection():
    page = draw("OPEN", width=320, height=320, size=40)
    assert LINES.read(page[None]) == ["OPEN"]  # auto: it is no line
    assert OCR(detection="never").read(page[None]) != ["OPEN"]
    lines = draw("HAPPY\nBIRTHDAY", width=320, height=256, size=40)
    assert LINES.read(lines[None])[0].replace(" ", "") == "HAPPYBIRTHDAY"  # from top to bottom


def test_scores_images_against_their_own_prompts():
    images = np.stack([draw("KBCA")] * 4 + [np.full((32, 64, 3), 255, np.uint8)])
    targets = ["KBCA", "kb ca", "KBCX", "BC", "X"]
    scores = LINES(images, [prompt(target, index) for index, target in enumerate(targets)])
    assert scores.values == [1.0, 1.0, 0.75, 1.0, 0.0]
    assert scores.parts["edit"] == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert scores.parts["substring"] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert scores.parts["exact"] == [1.0, 1.0, 0.0, 0.0, 0.0]
    for target in (None, "", " "):
        with pytest.raises(ValueError, match=r"prompt 7 .* has target="):
            LINES(images[:1], [prompt(target, 7)])


def test_a_video_scores_the_mean_of_its_frames():
    """Frames 0 and 2 of four count, so text that is gone halfway counts half."""
    blank = np.full((32, 96, 3), 255, np.uint8)
    word = draw("HEY", width=96)
    videos = np.array([[word, blank, word, blank], [word, word, blank, word]])
    scores = VideoOCR(every=2)(videos, [prompt("HEY"), prompt("HEY", 1)])
    assert scores.values == [1.0, 0.5]
    assert scores.parts["exact"] == [1.0, 0.5]
    with pytest.raises(ValueError, match="every=0"):
        VideoOCR(every=0)

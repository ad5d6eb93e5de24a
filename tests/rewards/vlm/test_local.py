"""A model of this process answers as the stock model does, one word after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_vlm import IDS, VOCABULARY, save_vlm
from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowgrpo_rc.rewards.vlm.models import Answer, LocalVlm, Question

IMAGES = np.random.default_rng(1).integers(0, 256, (3, 30, 60, 3), dtype=np.uint8)
LENGTH = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vlm(tmp_path_factory.mktemp("vlm"), seed=3)


@torch.inference_mode()
def oracle(folder: Path, pictures: list[np.ndarray], turns: list[str]) -> Answer:
    """Takes the likeliest word again and again, from the whole conversation each time."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        list(pictures), return_tensors="pt", input_data_format="channels_last"
    )
    words = []
    for place, turn in enumerate(turns):
        words.append("<|im_start|>")
        for _, height, width in seen.image_grid_thw.tolist() if place == 0 else ():
            pads = ["<|image_pad|>"] * (height * width // 4)
            words += ["<|vision_start|>", *pads, "<|vision_end|>"]
        words += [*turn.split(), "<|im_end|>"]
    ids = [IDS[word] for word in (*words, "<|im_start|>")]
    said: list[int] = []
    while len(said) < LENGTH and IDS["<eos>"] not in said:
        tokens = torch.tensor([ids + said])
        logits = model(
            input_ids=tokens,
            pixel_values=seen.pixel_values,
            image_grid_thw=seen.image_grid_thw,
            mm_token_type_ids=(tokens == IDS["<|image_pad|>"]).int(),
        ).logits
        said.append(int(logits[0, -1].argmax()))
    text = " ".join(VOCABULARY[word] for word in said if VOCABULARY[word][0] != "<")
    return Answer(text, IDS["<eos>"] not in said)


def test_it_says_the_likeliest_words_in_any_batch(folder: Path) -> None:
    """The questions of a batch have other lengths, one is shown two pictures, one is repeated."""
    conversations = [
        ([IMAGES[0]], ["rate it"]),
        ([IMAGES[1], IMAGES[2, :, :29]], ["two of the dog the cat"]),
        ([IMAGES[2]], ["the cat 1 2 3 4 5 6 7 8 9 the dog"]),
        ([IMAGES[1]], ["a dog", "2 3", "rate it"]),
    ]
    questions = [
        Question(pictures=pictures, text=first, turns=((said[0], said[1]),) if said else ())
        for pictures, (first, *said) in conversations
    ]
    vlm = LocalVlm(path=str(folder), device="cpu", dtype="fp32", batch_size=3, max_tokens=LENGTH)
    answers = vlm.answer(questions)
    assert answers == [oracle(folder, pictures, turns) for pictures, turns in conversations]
    assert len({answer.text for answer in answers}) > 1

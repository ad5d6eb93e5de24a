"""Scores of the reward models against other ways to compute them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.prompts import numbered_prompts, random_images, sums
from support.tiny_rewards import (
    CLIP_FEATURES,
    HIDDEN,
    blip,
    save_clip,
    save_head,
    save_image_reward,
)
from transformers import AutoTokenizer, CLIPModel

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.aesthetic import Aesthetic, linear_head
from flowgrpo_rc.rewards.clip import ClipScore
from flowgrpo_rc.rewards.exact_match import ExactMatch
from flowgrpo_rc.rewards.hpsv2 import HPSv2
from flowgrpo_rc.rewards.image_reward import ImageReward
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.pickscore import PickScore

TEXTS = ["a red dog", "the cat", "two"]
PROMPTS = [Prompt(text=text, index=index) for index, text in enumerate(TEXTS)]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 30, 46, 3), dtype=np.uint8)
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def pixels(images: np.ndarray, size: int) -> torch.Tensor:
    """Prepares images for CLIP with Pillow: shorter side to `size`, the middle, standardised."""
    rows = []
    for image in images:
        height, width = (int(side * size / min(image.shape[:2])) for side in image.shape[:2])
        resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
        left = (width - size) // 2
        top = (height - size) // 2
        middle = resized.crop((left, top, left + size, top + size))
        rows.append((np.asarray(middle) / 255 - MEAN) / STD)
    return torch.tensor(np.stack(rows).transpose(0, 3, 1, 2), dtype=torch.float32)


def logits(clip: Path, images: np.ndarray, texts: list[str]) -> tuple[np.ndarray, float]:
    """Returns the diagonal of the model's own logits, and its scale."""
    model = CLIPModel.from_pretrained(clip)
    tokenizer = AutoTokenizer.from_pretrained(clip)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**tokens, pixel_values=pixels(images, 20)).logits_per_image
    return out.diag().numpy(), model.logit_scale.exp().item()


def test_clip_scores(clip):
    wanted, scale = logits(clip, IMAGES, TEXTS)
    assert scale > 2
    for reward in (ClipScore(path=str(clip)), HPSv2(path=str(clip))):
        assert reward(IMAGES, PROMPTS).values == pytest.approx(wanted / scale, abs=1e-5)
    pick = PickScore(path=str(clip), processor=str(clip))
    assert pick(IMAGES, PROMPTS).values == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_aesthetic(clip, tmp_path, ending):
    file = save_head(tmp_path / f"head.{ending}", CLIP_FEATURES)
    state = torch.load(save_head(tmp_path / "same.pth", CLIP_FEATURES), weights_only=True)
    with torch.no_grad():
        seen = CLIPModel.from_pretrained(clip).get_image_features(pixels(IMAGES, 20))
    x = seen.pooler_output.double()
    x = x / x.square().sum(1, keepdim=True).sqrt()
    for layer in (0, 2):
        x = x @ state[f"layers.{layer}.weight"].double().T + state[f"layers.{layer}.bias"].double()
    assert Aesthetic(path=str(clip), head=str(file))(IMAGES, PROMPTS).values == pytest.approx(
        x[:, 0].tolist(), abs=1e-5
    )


def test_a_head_must_be_layers_in_a_row(clip, tmp_path):
    good = torch.load(save_head(tmp_path / "head.pth", 4), weights_only=True)
    two = {"layers.2.weight": torch.ones(2, 8), "layers.2.bias": torch.ones(2)}
    norm = {"layers.1.weight": torch.ones(8), "layers.1.bias": torch.ones(8)}
    no_bias = {name: tensor for name, tensor in good.items() if name != "layers.0.bias"}
    more = {"scale": torch.ones(1)}
    nan = {"layers.2.bias": torch.full((1,), torch.nan)}
    whole = {name: tensor.to(torch.int8) for name, tensor in good.items()}
    wrong = (no_bias, good | two, good | norm, good | more, good | nan, whole)
    for state in ({}, {"weight": torch.ones(1, 4)}, *wrong):
        with pytest.raises(ValueError, match="linear layers"):
            linear_head(state)
    with pytest.raises(ValueError, match=r"head='nowhere\.pth': give an existing file"):
        Aesthetic(path=str(clip), head="nowhere.pth")


def test_image_reward(tmp_path):
    """The head has no activation, so it is one affine map, which BLIP's matching head can hold."""
    folder = save_image_reward(tmp_path)
    model = blip()
    head = torch.load(save_head(tmp_path / "head.pth", HIDDEN, seed=2), weights_only=True)
    weight = head["layers.2.weight"] @ head["layers.0.weight"]
    bias = head["layers.2.weight"] @ head["layers.0.bias"] + head["layers.2.bias"]
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        model.itm_head.weight.copy_(weight.expand(2, -1))
        model.itm_head.bias.copy_(bias.expand(2))
        out = model(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            pixel_values=pixels(IMAGES, 32),
        ).itm_score[:, 0]
    wanted = ((out - 0.16717362830052426) / 1.0333394966054072).tolist()
    assert ImageReward(path=str(folder))(IMAGES, PROMPTS).values == pytest.approx(wanted, abs=1e-4)


def test_jpeg_sizes():
    noise = random_images(1, 64)[0]
    flat = np.full((64, 64, 3), 128, np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    batch = np.stack([noise, flat])
    grow = Jpeg(objective="incompressibility")(batch, numbered_prompts(2)).values
    shrink = Jpeg(objective="compressibility")(batch, numbered_prompts(2)).values
    assert grow[0] == len(file.getvalue()) / 1000
    assert grow[0] > 4 * grow[1] > 0
    assert shrink == [-value for value in grow]
    coarse = Jpeg(objective="incompressibility", quality=20)(batch, numbered_prompts(2)).values
    assert coarse[0] < grow[0]


@pytest.mark.parametrize(
    ("options", "values", "contains"),
    [
        ({}, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]),
        ({"strip": False}, [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]),
        ({"ignore_case": True}, [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]),
    ],
)
def test_exact_match(options, values, contains):
    texts = ["95a", " 95a\n", "95a.", "195a", "95A"]
    scores = ExactMatch(**options)(texts, sums(*["95a"] * 5))
    assert scores.values == values
    assert scores.parts == {"contains": contains}
    with pytest.raises(ValueError, match=r"prompt 1 \('1\+1='\) has target=None"):
        ExactMatch()(["1", "1"], sums("1", None))

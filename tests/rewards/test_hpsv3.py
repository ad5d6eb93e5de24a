"""HPSv3 against a formula of our own: patches, positions, hidden state and head by hand."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.tiny_vlm import IDS, INSTRUCTIONS, NUM_PIXELS, save_vlm_reward
from transformers import Qwen2VLForConditionalGeneration

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.edit_reward import EditReward
from flowgrpo_rc.rewards.hpsv3 import HPSv3
from flowgrpo_rc.rewards.http.wire import encode_png

CPU = {"device": "cpu", "dtype": "fp32"}
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), dtype=np.uint8)
PROMPTS = [Prompt(text="a red dog", index=0), Prompt(text="two", index=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vlm_reward(tmp_path_factory.mktemp("hpsv3"))


def patches_of(image: np.ndarray) -> torch.Tensor:
    """Cuts an image [24, 40, 3], scaled to 56 x 84, into patches of 14 in blocks of 2 x 2."""
    scaled = Image.fromarray(image).resize((84, 56), Image.Resampling.BICUBIC)
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = (np.asarray(scaled) / 255 - mean) / std
    rows = []
    for top, left, down, right in product((0, 28), (0, 28, 56), (0, 14), (0, 14)):
        y = top + down
        x = left + right
        patch = pixels[y : y + 14, x : x + 14].transpose(2, 0, 1)
        rows.append(np.stack([patch, patch], axis=1).ravel())  # a frame, twice
    return torch.tensor(np.array(rows), dtype=torch.float32)


@torch.inference_mode()
def oracle(
    folder: Path, pictures: list[np.ndarray], instruction: str, text: str, head: str
) -> float:
    """Scores one sample: the text model reads embeddings that were put together by hand."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval().model
    words = ["<|im_start|>"]
    for _ in pictures:
        words += ["<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"]
    words += [*instruction.replace("{text_prompt}", text).split(), "<|im_end|>", "<|im_start|>"]
    ids = torch.tensor([[IDS.get(word, IDS["<unk>"]) for word in words]])
    embeds = model.language_model.embed_tokens(ids)
    grid = torch.tensor([[1, 4, 6]] * len(pictures))
    seen = model.visual(torch.cat([patches_of(picture) for picture in pictures]), grid_thw=grid)
    embeds[ids == IDS["<|image_pad|>"]] = seen.pooler_output
    hidden = model.language_model(inputs_embeds=embeds).last_hidden_state
    state = hidden[0, words.index("<|Reward|>")].double().numpy()
    weights = load_file(folder / "model.safetensors")
    for layer in (0, 3, 5):
        weight, bias = (weights[f"{head}.{layer}.{n}"].double().numpy() for n in ("weight", "bias"))
        state = weight @ state + bias
        if layer < 5:
            state = np.maximum(state, 0)
    return float(state[0])


def test_it_is_the_mean_of_the_head_at_the_token(folder: Path) -> None:
    scores = HPSv3(path=str(folder), **CPU)(IMAGES, PROMPTS).values
    wanted = [
        oracle(folder, [image], INSTRUCTIONS[0], prompt.text, "rm_head")
        for image, prompt in zip(IMAGES, PROMPTS, strict=True)
    ]
    assert scores == pytest.approx(wanted, abs=2e-5)
    assert np.ptp(wanted) > 1e-3


def test_an_edit_has_the_mean_of_two_heads_beside_its_source(tmp_path: Path) -> None:
    folder = save_vlm_reward(tmp_path, heads=2, old_names=False, seed=3)
    reward = EditReward(path=str(folder), batch_size=1, **CPU)
    sources = [base64.b64decode(encode_png(image)) for image in IMAGES[::-1]]
    edits = [
        replace(prompt, images=(source,)) for prompt, source in zip(PROMPTS, sources, strict=True)
    ]
    wanted = []
    for i, prompt in enumerate(PROMPTS):
        shown = [IMAGES[1 - i], IMAGES[i]]
        heads = [
            oracle(folder, shown, INSTRUCTIONS[head], prompt.text, f"rm_heads.head_{head}")
            for head in (0, 1)
        ]
        wanted.append(np.mean(heads))
    assert reward(IMAGES, edits).values == pytest.approx(wanted, abs=2e-5)
    with pytest.raises(ValueError, match="has no image to compare"):
        reward(IMAGES[:1], PROMPTS[:1])


def test_a_prompt_cannot_bring_tokens_of_its_own(folder: Path) -> None:
    prompt = Prompt(text="a <|Reward|> dog <|image_pad|>", index=0)
    assert np.isfinite(HPSv3(path=str(folder), **CPU)(IMAGES[:1], [prompt]).values).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"has no reward\.json: make it by examples/convert_reward\.py hpsv3"),
        ({"num_pixels": 0}, r"num_pixels must be above 0"),
        ({"mean": 3.5}, r"reward\.json cannot be read: .* unexpected keyword argument 'mean'"),
        ({"instructions": ["a <|Reward|>"]}, r"needs \{text_prompt\} and <\|Reward\|> once"),
        ({"instructions": ["{text_prompt}"]}, r"needs \{text_prompt\} and <\|Reward\|> once"),
    ],
)
def test_a_folder_that_lacks_something(change, message, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    if change is not None:
        settings = {"instructions": INSTRUCTIONS, "token": "<|Reward|>", "num_pixels": NUM_PIXELS}
        (tmp_path / "reward.json").write_text(json.dumps(settings | change))
    with pytest.raises(ValueError, match=message):
        HPSv3(path=str(tmp_path))


def test_a_checkpoint_with_other_heads_is_refused(tmp_path: Path) -> None:
    file = save_vlm_reward(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"rm_head.scale": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"rm_head\.scale is no weight or bias"):
        HPSv3(path=str(tmp_path), **CPU)(IMAGES, PROMPTS)
    del tensors["rm_head.3.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="linear layers in a row"):
        HPSv3(path=str(tmp_path), **CPU)(IMAGES, PROMPTS)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("rm_head")}
    save_file(rest, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has 0 heads \(rm_head\).* but 1 instructions"):
        HPSv3(path=str(tmp_path), **CPU)(IMAGES, PROMPTS)

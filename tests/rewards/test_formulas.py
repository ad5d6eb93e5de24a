"""Scores of the reward models against other ways to compute them."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from support.reward_servers import answering, scripted
from support.tiny_rewards import (
    CLIP_FEATURES,
    HIDDEN,
    blip,
    save_clip,
    save_head,
    save_image_reward,
)
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BlipConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from flowgrpo_rc import assets
from flowgrpo_rc.assets.build_tiny_clip import evaluate_checkpoint
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.aesthetic import Aesthetic, linear_head
from flowgrpo_rc.rewards.clip import ClipScore
from flowgrpo_rc.rewards.geneval import Found, GenEval, Wish, degree, sides
from flowgrpo_rc.rewards.hpsv2 import HPSv2
from flowgrpo_rc.rewards.image_reward import ImageReward
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager
from flowgrpo_rc.rewards.pickscore import PickScore
from flowgrpo_rc.rewards.video_clip import VideoClip

TEXTS = ["a red dog", "the cat", "two"]
PROMPTS = [Prompt(text=text, index=index) for index, text in enumerate(TEXTS)]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 30, 46, 3), dtype=np.uint8)
MEAN, STD = (
    np.array([0.48145466, 0.4578275, 0.40821073]),
    np.array([0.26862954, 0.26130258, 0.27577711]),
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def pixels(images: np.ndarray, size: int) -> torch.Tensor:
    """CLIP's preparation by Pillow: shorter side to `size`, bicubic, the middle, standardised."""
    rows = []
    for image in images:
        height, width = image.shape[:2]
        scale = size / min(height, width)
        resized = Image.fromarray(image).resize(
            (int(width * scale), int(height * scale)), Image.Resampling.BICUBIC
        )
        left, top = (resized.width - size) // 2, (resized.height - size) // 2
        rows.append(
            (np.asarray(resized.crop((left, top, left + size, top + size))) / 255 - MEAN) / STD
        )
    return torch.tensor(np.stack(rows).transpose(0, 3, 1, 2), dtype=torch.float32)


def logits(clip: Path, images: np.ndarray, texts: list[str]) -> tuple[np.ndarray, float]:
    """The diagonal of the model's own logits, and its scale."""
    model, tokenizer = CLIPModel.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
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


def test_clip_of_a_video_is_the_mean_over_its_frames(clip):
    videos = np.stack([IMAGES, IMAGES[::-1]])
    wanted, scale = logits(
        clip, np.concatenate([videos[0, ::2], videos[1, ::2]]), [TEXTS[0]] * 2 + [TEXTS[1]] * 2
    )
    scores = VideoClip(path=str(clip), every=2)(videos, PROMPTS[:2]).values
    assert scores == pytest.approx(wanted.reshape(2, 2).mean(1) / scale, abs=1e-5)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_aesthetic(clip, tmp_path, ending):
    file = save_head(tmp_path / f"head.{ending}", CLIP_FEATURES)
    state = torch.load(save_head(tmp_path / "same.pth", CLIP_FEATURES), weights_only=True)
    with torch.no_grad():
        x = (
            CLIPModel.from_pretrained(clip)
            .get_image_features(pixels(IMAGES, 20))
            .pooler_output.double()
        )
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
    for state in ({}, {"weight": torch.ones(1, 4)}, no_bias, good | two, good | norm):
        with pytest.raises(ValueError, match="linear layers"):
            linear_head(state)
    with pytest.raises(ValueError, match=r"head='nowhere\.pth': give an existing file"):
        Aesthetic(path=str(clip), head="nowhere.pth")


def test_image_reward(tmp_path):
    """The head has no activation, so it is one affine map: the matching head of BLIP's retrieval
    model can hold it.
    """
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


# --- GenEval, by hand


def dog(left: float, top: float, color: str | None = None, name: str = "dog") -> Found:
    return Found(name=name, box=(left, top, left + 10, top + 10), color=color)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (dog(0, 0), dog(50, 0), {"left of"}),
        (dog(50, 0), dog(0, 0), {"right of"}),
        (dog(0, 0), dog(0, 50), {"above"}),
        (dog(0, 50), dog(0, 0), {"below"}),
        (dog(0, 0), dog(50, 50), {"left of", "above"}),
        (dog(0, 0), dog(0, 0), set()),
        (dog(0, 0), dog(2, 0), set()),  # as near as a tenth of both widths
        (dog(0, 0), dog(3, 0), set()),  # (3 - 2) / 3 is no half
        (dog(0, 0), dog(5, 0), {"left of"}),  # (5 - 2) / 5 is
    ],
)
def test_sides(one, other, found):
    assert sides(one, other) == found


TWO = Wish(name="dog", count=2)
CAT = Wish(name="cat", count=1)
FEWER = Wish(name="dog", count=3, excluded=True)


@pytest.mark.parametrize(
    ("wish", "objects", "met"),
    [
        (TWO, [], 0.0),
        (TWO, [dog(0, 0)], 0.5),
        (TWO, [dog(0, 0)] * 3, 1.0),
        (FEWER, [dog(0, 0)] * 2, 1.0),
        (FEWER, [dog(0, 0)] * 3, 0.5),
        (FEWER, [dog(0, 0)] * 9, 0.0),
        (Wish(name="dog", count=1, excluded=True), [dog(0, 0)], 0.0),
        (Wish(name="dog", count=1, excluded=True), [dog(0, 0, name="cat")], 1.0),
        (Wish(name="dog", count=2, color="red"), [dog(0, 0, "red"), dog(0, 0, "blue")], 0.75),
        (Wish(name="dog", count=1, color="red"), [dog(0, 0, "red")], 1.0),
        (Wish(name="dog", count=1, color="red"), [dog(0, 0)], 0.5),
        (
            Wish(name="dog", count=1, position=("left of", 0)),
            [dog(0, 0), dog(50, 0, name="cat")],
            1.0,
        ),
        (
            Wish(name="dog", count=1, position=("right of", 0)),
            [dog(0, 0), dog(50, 0, name="cat")],
            0.5,
        ),
        (Wish(name="dog", count=1, position=("left of", 0)), [dog(0, 0)], 0.5),
    ],
)
def test_how_far_a_wish_is_met(wish, objects, met):
    assert degree(wish, [CAT], objects) == pytest.approx(met)


# --- Examples


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    return load_example("convert_reward")


def load_example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_open_clip_weights_in_transformers(converter):
    """A tower of open_clip, written down with torch's own attention, against the one of
    transformers.
    """
    torch.manual_seed(0)
    width, heads, patch, size = 8, 2, 5, 10
    block = nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(width),
            "attn": nn.MultiheadAttention(width, heads, batch_first=True),
            "ln_2": nn.LayerNorm(width),
            "mlp": nn.ModuleDict({"c_fc": nn.Linear(width, 12), "c_proj": nn.Linear(12, width)}),
        }
    )
    vision = nn.ModuleDict(
        {
            "conv1": nn.Conv2d(3, width, patch, patch, bias=False),
            "ln_pre": nn.LayerNorm(width),
            "transformer": nn.ModuleDict({"resblocks": nn.ModuleList([block])}),
            "ln_post": nn.LayerNorm(width),
        }
    )
    for parameter in vision.parameters():
        nn.init.normal_(parameter, std=0.5)
    own = {"class_embedding": torch.randn(width), "positional_embedding": torch.randn(5, width)}
    own["proj"] = torch.randn(width, 6)
    state = {f"visual.{name}": tensor for name, tensor in {**vision.state_dict(), **own}.items()}

    pictures = torch.randn(2, 3, size, size)
    x = vision["conv1"](pictures).flatten(2).transpose(1, 2)
    x = torch.cat([own["class_embedding"].expand(2, 1, -1), x], dim=1) + own["positional_embedding"]
    x = vision["ln_pre"](x)
    y = block["ln_1"](x)
    x = x + block["attn"](y, y, y, need_weights=False)[0]
    x = x + block["mlp"]["c_proj"](nn.functional.gelu(block["mlp"]["c_fc"](block["ln_2"](x))))
    wanted = vision["ln_post"](x[:, 0]) @ own["proj"]

    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=heads,
        image_size=size,
        patch_size=patch,
        projection_dim=6,
        hidden_act="gelu",
    )
    model = CLIPVisionModelWithProjection(config)
    state["text_projection"] = torch.randn(width, 6)
    converted = converter.open_clip_to_transformers(state)
    assert converted.pop("text_projection.weight").shape == (6, width)
    model.load_state_dict(converted)
    torch.testing.assert_close(model(pictures).image_embeds, wanted, rtol=1e-5, atol=1e-5)


def test_open_clip_text_weights_have_the_names_of_transformers(converter, clip):
    wanted = {
        name for name in CLIPModel.from_pretrained(clip).state_dict() if name.startswith("text_")
    }
    block = ["ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj"]
    names = [
        "token_embedding.weight",
        "positional_embedding",
        "ln_final.weight",
        "ln_final.bias",
        "text_projection",
    ]
    for layer in (0, 1):
        names += [
            f"transformer.resblocks.{layer}.{part}.{kind}"
            for part in block
            for kind in ("weight", "bias")
        ]
        names += [
            f"transformer.resblocks.{layer}.attn.in_proj_{kind}" for kind in ("weight", "bias")
        ]
    state = {name: torch.zeros(3, 3) for name in [*names, "visual.proj", "attn_mask"]}
    assert set(converter.open_clip_to_transformers(state)) - {"visual_projection.weight"} == wanted


def test_image_reward_weights_have_the_names_of_transformers(converter, tmp_path):
    """The names that the published file has, for one layer of each encoder."""
    own = {
        "cls_token": "embeddings.class_embedding",
        "pos_embed": "embeddings.position_embedding",
        "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
        "blocks.0.norm1.bias": "encoder.layers.0.layer_norm1.bias",
        "blocks.0.norm2.bias": "encoder.layers.0.layer_norm2.bias",
        "blocks.0.attn.qkv.weight": "encoder.layers.0.self_attn.qkv.weight",
        "blocks.0.attn.proj.weight": "encoder.layers.0.self_attn.projection.weight",
        "blocks.0.mlp.fc1.weight": "encoder.layers.0.mlp.fc1.weight",
        "norm.weight": "post_layernorm.weight",
    }
    state = {f"blip.visual_encoder.{name}": torch.zeros(1) for name in own}
    text = "encoder.layer.0.crossattention.self.query.weight"
    state |= {
        f"blip.text_encoder.{text}": torch.zeros(1),
        "blip.text_encoder.embeddings.position_ids": torch.zeros(1),
    }
    state |= {"mlp.layers.0.weight": torch.zeros(1), "blip.itm_head.weight": torch.zeros(1)}
    converted = set(converter.blip_to_transformers(state))
    assert converted == {f"vision_model.{name}" for name in own.values()} | {
        f"text_encoder.{text}",
        "layers.0.weight",
    }
    assert {name for name in converted if not name.startswith("layers.")} <= set(
        blip().state_dict()
    )


def test_image_reward_gets_the_sizes_of_its_towers(converter, tmp_path):
    """The sizes of a BERT base and of a ViT-L/16, whatever the defaults of BlipConfig are."""
    torch.save({"mlp.layers.0.weight": torch.zeros(1)}, tmp_path / "published.pt")
    save_image_reward(tmp_path)
    converter.convert_image_reward(tmp_path / "published.pt", tmp_path / "out", str(tmp_path))
    config = BlipConfig.from_pretrained(tmp_path / "out")
    of_both = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "layer_norm_eps",
    )
    bert = BertConfig()
    for name in (*of_both, "max_position_embeddings", "hidden_act"):
        assert getattr(config.text_config, name) == getattr(bert, name), name
    assert [getattr(config.vision_config, name) for name in of_both] == [1024, 4096, 24, 16, 1e-6]


def test_the_example_of_a_reward_of_ones_own(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    picture = np.zeros((1, 4, 4, 3), np.uint8)
    picture[..., 0] = 255
    terms = {
        "tint": {"_target_": "my_reward.Tint", "channel": "blue"},
        "red": {"_target_": "function", "path": "my_reward:redness"},
    }
    manager = RewardManager(RewardConfig(terms=terms))
    parts = manager.collect([manager.submit(picture, PROMPTS[:1])]).parts
    manager.close()
    assert {name: value.item() for name, value in parts.items()} == {
        "tint": -0.5,
        "tint/brightness": pytest.approx(1 / 3),
        "red": 1.0,
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"prompt 4 \('x'\) has no field include"),
        ({"include": []}, "has no field include"),
        ({"include": [{"class": "dog"}]}, "must be an object with class and count"),
        ({"include": [{"class": "dog", "count": 0}]}, "must be an object with class and count"),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["near", 0]}]},
            "position .*: give one of left of",
        ),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["above", 1]}]},
            "position .*: give one of left of",
        ),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["above"]}]},
            r"perhaps color and position \[",
        ),
        (
            {"include": [{"class": "dog", "count": 1, "position": "above"}]},
            r"perhaps color and position \[",
        ),
        ({"include": [{"class": "dog", "count": 1, "color": 3}]}, r"perhaps color and position \["),
        ({"include": ["dog"]}, r"perhaps color and position \["),
        ({"include": [{"class": "dog", "count": 1}], "exclude": 3}, "exclude must be a list"),
    ],
)
def test_geneval_asks_no_server_about_a_prompt_that_it_cannot_judge(metadata, message):
    with pytest.raises(ValueError, match=message):
        GenEval(url="http://127.0.0.1:1")(
            IMAGES[:1], [Prompt(text="x", index=4, metadata=metadata)]
        )


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"objects": []},
        {"objects": [[{"class": "dog"}]]},
        {"objects": [[{"class": "dog", "box": [1, 2, 3, "4"]}]]},
    ],
)
def test_geneval_refuses_what_is_no_detection(answer):
    metadata = {"include": [{"class": "dog", "count": 1}]}
    with (
        scripted(answering(lambda _: answer)) as server,
        pytest.raises(ValueError, match=r"the answer|of the answer"),
    ):
        GenEval(url=server.url)(IMAGES[:1], [Prompt(text="x", index=4, metadata=metadata)])


def test_the_bundled_clip_knows_the_held_out_words():
    """As well as its build said; by chance it would find 1 in 512, and prefer the right one of two
    in every second.
    """
    words = [line.strip('"') for line in assets.path("prompts/glyph_val.txt").read_text().split()]
    folder = assets.path("tiny_clip")
    said = json.loads((folder / "build_metrics.json").read_text())["val"]
    found = evaluate_checkpoint(folder, words)
    assert found == pytest.approx(said, abs=0.02)
    assert found["found_among_all"] > 0.2
    assert found["nearer_than_one_changed"] > 0.8
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6

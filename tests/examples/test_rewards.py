"""The example of a user's own reward, and the conversion of published reward models."""

from __future__ import annotations

import json
from pathlib import Path

import convert_reward
import numpy as np
import pytest
import smollm2
import torch
from support.tiny_rewards import save_clip, save_image_reward
from support.tiny_vlm import INSTRUCTIONS, VOCABULARY, save_vlm, save_vlm_reward
from torch import nn
from transformers import (
    BertConfig,
    BlipConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.data.prompts import read_prompts
from flowgrpo_rc.rewards.hpsv3 import HPSv3
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def test_open_clip_weights_in_transformers():
    """A tower of open_clip, written here with torch's own attention, against that of
    transformers.
    """
    torch.manual_seed(0)
    width = 8
    heads = 2
    patch = 5
    size = 10
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
    converted = convert_reward.open_clip_to_transformers(state)
    assert converted.pop("text_projection.weight").shape == (6, width)
    model.load_state_dict(converted)
    torch.testing.assert_close(model(pictures).image_embeds, wanted, rtol=1e-5, atol=1e-5)


def test_open_clip_text_weights_have_the_names_of_transformers(clip: Path):
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
    assert (
        set(convert_reward.open_clip_to_transformers(state)) - {"visual_projection.weight"}
        == wanted
    )


def test_image_reward_gets_the_sizes_of_its_towers(tmp_path: Path):
    """The sizes are those of a BERT base and of a ViT-L/16, not the defaults of BlipConfig."""
    torch.save({"mlp.layers.0.weight": torch.zeros(1)}, tmp_path / "published.pt")
    save_image_reward(tmp_path)
    convert_reward.convert_image_reward(tmp_path / "published.pt", tmp_path / "out", str(tmp_path))
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


def test_the_example_of_a_user_s_reward():
    picture = np.zeros((1, 4, 4, 3), np.uint8)
    picture[..., 0] = 255
    terms = {
        "tint": {"_target_": "my_reward.Tint", "channel": "blue"},
        "red": {"_target_": "function", "path": "my_reward:redness"},
    }
    manager = RewardManager(RewardConfig(terms=terms))
    parts = manager.collect([manager.submit(picture, [Prompt(text="x", index=0)])]).parts
    manager.close()
    assert {name: value.item() for name, value in parts.items()} == {
        "tint": -0.5,
        "tint/brightness": pytest.approx(1 / 3),
        "red": 1.0,
    }


def test_the_reward_of_the_small_model_in_trl_s_form_scores_its_own_prompts(tmp_path: Path):
    smollm2.write_prompts(tmp_path)
    files = (tmp_path / "train.jsonl", tmp_path / "val.jsonl")
    asked, held_out = (read_prompts(file, require_target=True, chats=True) for file in files)
    assert not {prompt.text for prompt in asked} & {prompt.text for prompt in held_out}
    assert len(asked) == len(held_out) + 1 == 47
    manager = RewardManager(
        RewardConfig(terms={"x": {"_target_": "function", "path": "smollm2:names_capital"}})
    )
    answers = ["It is Tirana.", "Luanda", "Yerevan, as all of you know very well", "Paris"]
    found = manager.collect([manager.submit(answers, asked[:4])])
    manager.close()
    assert found.total.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_hpsv3_with_the_names_and_the_vocabulary_of_the_published_file(tmp_path: Path):
    """The base has room for more words than it uses."""
    base = save_vlm(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    published = save_vlm_reward(tmp_path / "published")
    config["text_config"]["vocab_size"] = len(VOCABULARY) + 7
    (base / "config.json").write_text(json.dumps(config))
    code = tmp_path / "collator.py"
    told = INSTRUCTIONS[0]
    code.write_text(
        f"raise SystemExit\nINSTRUCTION = {told[:9]!r}\nprompt_with_special_token = {told[9:]!r}\n"
    )
    out = tmp_path / "out"
    convert_reward.convert_vlm("hpsv3", published / "model.safetensors", out, str(base), [code])
    image = np.random.default_rng(0).integers(0, 256, (1, 20, 30, 3), dtype=np.uint8)
    prompt = [Prompt(text="a red dog", index=0)]
    asked = json.loads((out / "reward.json").read_text())
    assert asked == {"instructions": [told], "token": "<|Reward|>", "num_pixels": 200704}
    options = {"device": "cpu", "dtype": "fp32"}
    changed = json.loads((published / "reward.json").read_text()) | {"num_pixels": 200704}
    (published / "reward.json").write_text(json.dumps(changed))
    assert HPSv3(path=str(out), **options)(image, prompt) == HPSv3(path=str(published), **options)(
        image, prompt
    )
    code.write_text("INSTRUCTION = 1")
    with pytest.raises(SystemExit, match="there is no text INSTRUCTION"):
        convert_reward.convert_vlm("hpsv3", published / "model.safetensors", out, str(base), [code])

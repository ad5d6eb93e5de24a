"""A Qwen2-VL with small random weights: one that answers, and one with reward heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HIDDEN = 32
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")
SPECIAL += ("<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|Reward|>")
VOCABULARY = (*SPECIAL, *"0123456789", "a", "red", "dog", "the", "cat", "two", "of", "rate", "it")
IDS = {word: index for index, word in enumerate(VOCABULARY)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
INSTRUCTIONS = (
    "rate it : {text_prompt} the dog <|Reward|> of it",
    "the cat of {text_prompt} <|Reward|>",
)
NUM_PIXELS = 56 * 56


def config() -> Qwen2VLConfig:
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(VOCABULARY),
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            },
            "pad_token_id": IDS["<pad>"],
            "eos_token_id": IDS["<eos>"],
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2},
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=TEMPLATE,
    )


def save_vlm(folder: Path, *, seed: int = 0) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config())
        with torch.no_grad():  # with the initial weights every picture would look the same
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
    model.generation_config.eos_token_id = IDS["<eos>"]
    for part in (
        model,
        tokenizer(),
        Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": NUM_PIXELS}),
    ):
        part.save_pretrained(folder)
    return folder


def save_vlm_reward(folder: Path, *, heads: int = 1, old_names: bool = True, seed: int = 0) -> Path:
    """Saves a model with reward heads, its weights named as in the published checkpoints."""
    save_vlm(folder, seed=seed)
    tensors = load_file(folder / "model.safetensors")
    if old_names:
        tensors = {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): one
            for name, one in tensors.items()
        }
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        for head in range(heads):
            prefix = "rm_head." if heads == 1 else f"rm_heads.head_{head}."
            layers = nn.Sequential(
                nn.Linear(HIDDEN, 12),
                nn.ReLU(),
                nn.Dropout(),
                nn.Linear(12, 6),
                nn.ReLU(),
                nn.Linear(6, 2),
            )
            tensors |= {prefix + name: one for name, one in layers.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    asked = {"instructions": INSTRUCTIONS[:heads], "token": "<|Reward|>", "num_pixels": NUM_PIXELS}
    (folder / "reward.json").write_text(json.dumps(asked))
    return folder

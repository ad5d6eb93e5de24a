"""Small random weights of the reward models, saved by the real classes of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from bundled_models.tiny_sd3 import clip_tokenizer
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForImageTextRetrieval,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
)

CLIP_FEATURES = 12
SPECIAL = ("bos", "eos", "pad")
HIDDEN = 16  # of BLIP's text encoder
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "dog", "cat", "of", "the", "two")


def save_clip(folder: Path) -> Path:
    image_size = 20
    tokenizer = clip_tokenizer()
    size = {"hidden_size": 16, "intermediate_size": 24}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 16}
    text |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    config = CLIPConfig(
        text_config={**size, **text},
        vision_config={**size, "image_size": image_size, "patch_size": 10},
        projection_dim=CLIP_FEATURES,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _louder(CLIPModel(config))
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size}
    )
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def save_head(file: Path, width: int, *, seed: int = 1) -> Path:
    """Saves linear layers named as LAION's predictor names them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.ModuleDict(
            {"layers": nn.Sequential(nn.Linear(width, 8), nn.Dropout(), nn.Linear(8, 1))}
        )
    if file.suffix == ".safetensors":
        save_file(head.state_dict(), file)
    else:
        torch.save(head.state_dict(), file)
    return file


def blip() -> BlipForImageTextRetrieval:
    text = {"vocab_size": len(WORDS), "hidden_size": HIDDEN}
    text |= {"encoder_hidden_size": 24, "max_position_embeddings": 40}
    size = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BlipConfig(
        text_config={**size, **text},
        vision_config={**size, "hidden_size": 24, "image_size": 32, "patch_size": 16},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _louder(BlipForImageTextRetrieval(config)).eval()


def save_image_reward(folder: Path) -> Path:
    """Saves the folder that `image_reward` reads: two encoders of a BLIP and a head."""
    model = blip()
    model.config.save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    head = save_head(folder / "head.pth", HIDDEN, seed=2)
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("vision_model.", "text_encoder."))
    }
    save_file(tensors | torch.load(head, weights_only=True), folder / "model.safetensors")
    head.unlink()
    return folder


def _louder(model: nn.Module) -> nn.Module:
    """Scales weights up: with the initial ones every picture would get the same score."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model

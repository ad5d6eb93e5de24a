"""Turns the published files of two reward models into folders that flowgrpo_rc reads.

A folder holds safetensors and a configuration.

    python examples/convert_reward.py hpsv2 HPS_v2.1_compressed.pt outputs/hpsv2
    python examples/convert_reward.py image_reward ImageReward.pt outputs/image_reward

HPS_v2.1_compressed.pt is on the hub in xswu/HPSv2, ImageReward.pt in THUDM/ImageReward. The files
are read as tensors only. Configuration and tokenizer come from the model that was fine-tuned
(--base, a hub id or a folder).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, BlipConfig, CLIPConfig, CLIPImageProcessorPil, CLIPModel

BASES = {"hpsv2": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "image_reward": "bert-base-uncased"}
# A BERT base with cross-attention to a ViT-L/16, where the defaults of BlipConfig differ.
IMAGE_REWARD_TEXT = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "encoder_hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
}
IMAGE_REWARD_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}

# Names of open_clip -> names of transformers' CLIPModel.
OPEN_CLIP = (
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.", ".self_attn."),
)
# Names of ImageReward's BLIP -> names of transformers' two encoders.
BLIP = (
    (r"^blip\.text_encoder\.", "text_encoder."),
    (r"^mlp\.layers\.", "layers."),
    (r"^blip\.visual_encoder\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision_model.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision_model.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision_model.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.", "vision_model.encoder.layers."),
    (r"^(vision_model\..*)\.attn\.qkv\.", r"\1.self_attn.qkv."),
    (r"^(vision_model\..*)\.attn\.proj\.", r"\1.self_attn.projection."),
    (r"^(vision_model\..*)\.norm(\d)\.", r"\1.layer_norm\2."),
)


def open_clip_to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the weights of open_clip to those of transformers' `CLIPModel`.

    open_clip keeps query, key and value in one matrix, which is split here.

    Args:
      state: the weights by their names in open_clip.

    Returns:
      The weights by their names in transformers.
    """
    converted = dict(_open_clip_weights(state))
    for name in ("visual_projection.weight", "text_projection.weight"):
        converted[name] = converted[name].T.contiguous()
    return converted


def blip_to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the weights of ImageReward, and leaves out those that it does not use to score.

    Args:
      state: the weights by their names in the published file.

    Returns:
      The weights of the two encoders and the head by their names in transformers.
    """
    renamed = {_renamed(name, BLIP): tensor for name, tensor in state.items()}
    return {
        name: tensor.contiguous()
        for name, tensor in renamed.items()
        if name.startswith(("text_encoder.", "vision_model.", "layers."))
        and not name.endswith("position_ids")
    }


def convert_hpsv2(file: Path, out: Path, base: str) -> None:
    """Converts HPSv2.

    Args:
      file: the published file.
      out: the folder to write to.
      base: hub id or folder of the CLIP that it was fine-tuned from.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    model = CLIPModel(CLIPConfig.from_pretrained(base))
    model.load_state_dict(open_clip_to_transformers(loaded.get("state_dict", loaded)))
    for part in (model, AutoTokenizer.from_pretrained(base), CLIPImageProcessorPil()):
        part.save_pretrained(out)


def convert_image_reward(file: Path, out: Path, base: str) -> None:
    """Converts ImageReward.

    Args:
      file: the published file.
      out: the folder to write to.
      base: hub id or folder of the BERT whose tokenizer it uses.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    config = BlipConfig(text_config=IMAGE_REWARD_TEXT, vision_config=IMAGE_REWARD_VISION)
    config.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    save_file(blip_to_transformers(loaded), out / "model.safetensors")


def _open_clip_weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        renamed = _renamed(name, OPEN_CLIP)
        if ".in_proj_" in renamed:
            stem, kind = renamed.split(".in_proj_")
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{stem}.{part}_proj.{kind}", rows.contiguous()
        elif name != "attn_mask":
            yield renamed, tensor


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def main() -> None:
    """Parses the command line and converts one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(BASES))
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", help=f"default: {BASES}")
    arguments = parser.parse_args()
    converters = {"hpsv2": convert_hpsv2, "image_reward": convert_image_reward}
    base = arguments.base or BASES[arguments.model]
    converters[arguments.model](arguments.file, arguments.out, base)


if __name__ == "__main__":
    main()

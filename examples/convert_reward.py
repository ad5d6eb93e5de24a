"""Turns the published files of four reward models into folders that flowgrpo_rc reads.

A folder holds safetensors and a configuration.

    python examples/convert_reward.py hpsv2 HPS_v2.1_compressed.pt outputs/hpsv2
    python examples/convert_reward.py image_reward ImageReward.pt outputs/image_reward
    python examples/convert_reward.py hpsv3 HPSv3.safetensors outputs/hpsv3 \
        --prompt HPSv3/hpsv3/dataset/data_collator_qwen.py
    python examples/convert_reward.py edit_reward model.safetensors outputs/edit_reward \
        --prompt EditReward/dataset/prompts.py EditReward/dataset/data_collator_qwen_edit.py

HPS_v2.1_compressed.pt is on the hub in xswu/HPSv2, ImageReward.pt in THUDM/ImageReward, and
HPSv3.safetensors in MizzenAI/HPSv3. The files are read as tensors only. Configuration and tokenizer
come from the model that was fine-tuned (--base, a hub id or a folder). What HPSv3 and EditReward
are told stands in their authors' code, github.com/MizzenAI/HPSv3 and
github.com/TIGER-AI-Lab/EditReward, which is read and never run. Their 17 GB are linked, not copied.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BlipConfig,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

BASES = {
    "hpsv2": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    "image_reward": "bert-base-uncased",
    "hpsv3": "Qwen/Qwen2-VL-7B-Instruct",
    "edit_reward": "Qwen/Qwen2.5-VL-7B-Instruct",
}
REWARD_TOKEN = "<|Reward|>"  # a token that these two add to the tokenizer
REWARD_PIXELS = 256 * 28 * 28
# The names of what each head is told, which ends with the text of the name `ENDING`.
TOLD = {
    "hpsv3": ("INSTRUCTION",),
    "edit_reward": ("INSTRUCTION_EDIT_FOLLOWING", "INSTRUCTION_EDIT_QUALITY"),
}
ENDING = "prompt_with_special_token"
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


def convert_vlm(model: str, file: Path, out: Path, base: str, prompts: Sequence[Path]) -> None:
    """Converts a vision-language model with reward heads.

    Args:
      model: a key of `TOLD`.
      file: the published file, in safetensors.
      out: the folder to write to.
      base: hub id or folder of the model that it was fine-tuned from.
      prompts: the Python files with what its heads are told.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
    tokenizer.save_pretrained(out)
    Qwen2VLImageProcessorPil.from_pretrained(base).save_pretrained(out)
    config = AutoConfig.from_pretrained(base)
    with safe_open(file, framework="pt") as weights:
        (embeddings,) = (n for n in weights.keys() if n.endswith("embed_tokens.weight"))  # noqa: SIM118
        config.get_text_config().vocab_size = weights.get_slice(embeddings).get_shape()[0]
    config.save_pretrained(out)
    texts = {name: text for prompt in prompts for name, text in texts_in(prompt).items()}
    missing = [name for name in (*TOLD[model], ENDING) if name not in texts]
    if missing:
        raise SystemExit(
            f"--prompt: there is no text {missing[0]} in {', '.join(map(str, prompts))}"
        )
    asked = {
        "instructions": [texts[name] + texts[ENDING] for name in TOLD[model]],
        "token": REWARD_TOKEN,
        "num_pixels": REWARD_PIXELS,
    }
    (out / "reward.json").write_text(json.dumps(asked, indent=2))
    link = out / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(file.resolve())


def texts_in(file: Path) -> dict[str, str]:
    """Reads the texts that a Python file gives names to at its top, without running it."""
    texts = {}
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(str(text))):
                texts[name] = text
    return texts


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
    parser.add_argument("--prompt", type=Path, nargs="+", help=f"of {', '.join(TOLD)}: see above")
    arguments = parser.parse_args()
    base = arguments.base or BASES[arguments.model]
    if (arguments.model in TOLD) != (arguments.prompt is not None):
        parser.error(f"--prompt FILE belongs to {' and '.join(TOLD)}, which need it")
    if arguments.model in TOLD:
        convert_vlm(arguments.model, arguments.file, arguments.out, base, arguments.prompt)
        return
    converters = {"hpsv2": convert_hpsv2, "image_reward": convert_image_reward}
    converters[arguments.model](arguments.file, arguments.out, base)


if __name__ == "__main__":
    main()

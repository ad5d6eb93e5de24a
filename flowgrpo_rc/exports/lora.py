"""LoRA files for other programs: diffusers' format for image models, peft's for language models."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import save
from torch import Tensor

from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora_files import TENSORS_NAME, export_name, file_key, peft_files
from flowgrpo_rc.models.networks import FIRST, by_transformer


def export_lora(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """Writes LoRA tensors for the programs that sample from such a model.

    With model.kind=diffusion: `pipe.load_lora_weights(folder)` of stock diffusers, and tools that
    read its keys. A second transformer has its file in a folder of its own, which
    `pipe.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)` loads. With
    model.kind=causal_lm: `PeftModel.from_pretrained(base, folder)` of stock peft, and vLLM.
    Returned is the file with the tensors, of the first transformer if there are several.
    """
    if config.kind == "causal_lm":
        return _export_for_peft(state, config, folder)
    for component, tensors in by_transformer(state).items():
        path = folder / export_name(config, component)
        _export_for_diffusers(tensors, config, path)
    return folder / export_name(config, FIRST)


def _export_for_diffusers(state: Mapping[str, Tensor], config: ModelConfig, path: Path) -> None:
    """Folds alpha / rank into lora_B, since loaders take a file without metadata at strength 1.

    That is exact if the scale is a power of two. Otherwise the tensors stay as they are, and the
    file carries the metadata from which diffusers restores the scale. The images are bit-equal
    either way.
    """
    scale = config.lora_alpha / config.lora_rank
    # frexp splits a number into m x 2^e with m in [0.5, 1); a power of two has m = 0.5.
    folds = math.frexp(scale)[0] == 0.5
    tensors = {
        name: tensor * scale if folds and ".lora_B." in name else tensor
        for name, tensor in state.items()
    }
    metadata = {"format": "pt"}
    if not folds:
        modules = sorted({name.split(".lora_")[0] for name in state})
        fields = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": modules}
        described = {f"transformer.{key}": value for key, value in fields.items()}
        metadata[LORA_ADAPTER_METADATA_KEY] = json.dumps(described, sort_keys=True)
    content = {
        file_key(name, config.kind): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_atomic(path, save(content, metadata=metadata))


def _export_for_peft(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> Path:
    """Writes the tensors as they are; peft's description of the adapter holds rank and alpha.

    Of a base model in a local folder it holds the name of the folder, and no path of this machine.
    """
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in state}
    files = peft_files(
        state,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=sorted(config.target_modules or layers),
        base=config.hub_id() or Path(config.path).name,
    )
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder / TENSORS_NAME

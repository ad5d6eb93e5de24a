"""A LoRA of a language model as peft, transformers and vLLM read it: two files in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"


def peft_files(
    state: Mapping[str, Tensor],
    *,
    adapter: str,
    rank: int,
    alpha: int,
    target_modules: Sequence[str],
    base: str,
) -> dict[str, bytes]:
    """Contents by file name. `state` has the network's own parameter names, `adapter` is the LoRA's
    name in them.
    """
    described = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    described["target_modules"] = sorted(
        described["target_modules"]
    )  # peft holds a set, which has no order
    tensors = {
        peft_key(name, adapter): tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    return {
        CONFIG_NAME: (json.dumps(described, indent=2, sort_keys=True) + "\n").encode(),
        TENSORS_NAME: save(tensors, metadata={"format": "pt"}),
    }


def peft_key(name: str, adapter: str) -> str:
    """A parameter's name in the file."""
    return f"base_model.model.{name.replace(f'.{adapter}.', '.')}"

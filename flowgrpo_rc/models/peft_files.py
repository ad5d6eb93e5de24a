"""The two files of a language model's LoRA, as peft, transformers and vLLM read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor

# The LoRA's name in the parameters of a network, `....lora_A.default.weight`. Files leave it out.
ADAPTER = "default"
# What names in the file of a language model begin with.
PREFIX = "base_model.model."
CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"


def peft_files(
    state: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: int,
    target_modules: Sequence[str],
    base: str,
) -> dict[str, bytes]:
    """Makes the contents of both files, by their names.

    Args:
      state: the tensors of the LoRA by their names in the network.
      rank: inner dimension of the LoRA.
      alpha: the LoRA is added with strength alpha / rank.
      target_modules: name endings of the layers that have a LoRA.
      base: path or hub id of the base model.
    """
    described = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    # peft holds a set, which has no order; equal runs shall write equal files.
    described["target_modules"] = sorted(described["target_modules"])
    tensors = {
        f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    return {
        CONFIG_NAME: (json.dumps(described, indent=2, sort_keys=True) + "\n").encode(),
        TENSORS_NAME: save(tensors, metadata={"format": "pt"}),
    }

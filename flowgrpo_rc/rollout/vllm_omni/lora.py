"""The trainer's LoRA as the engine holds it, and the fingerprint by which both sides compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_to_bind(
    state: Mapping[str, Tensor], *, adapter: str, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the tensors that the engine must hold: in its precision, alpha / rank in lora_B.

    Args:
      state: name -> tensor in the trainer's network, such as
        `blocks.0.attn.to_q.lora_A.default.weight`.
      adapter: the adapter's name, `default` in that example; peft's files and new names lack it.
      scale: alpha / rank.
      dtype: the engine's precision.
    """
    return {
        name.replace(f".{adapter}.", "."): (tensor * scale if ".lora_B." in name else tensor).to(
            "cpu", dtype
        )
        for name, tensor in state.items()
    }


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Computes SHA-256 over names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()

"""The trainer's LoRA as the engine holds it, and the fingerprint by which both sides compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_to_bind(
    state: Mapping[str, Tensor], *, adapter: str, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors that the engine must end up with: in its precision, alpha / rank folded into
    lora_B.

    state: named as in the trainer's network, `blocks.0.attn.to_q.lora_A.default.weight`; here
    without the adapter's name, as peft writes them to files.
    """
    return {
        name.replace(f".{adapter}.", "."): (tensor * scale if ".lora_B." in name else tensor).to(
            "cpu", dtype
        )
        for name, tensor in state.items()
    }


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()

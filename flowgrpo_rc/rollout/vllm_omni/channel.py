"""Messages between trainer and engine: a JSON object, and tensors as safetensors, never pickles.

The LoRA travels as the engine holds it, and its fingerprint back, by which both sides compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor


class Message(NamedTuple):
    """One message: its kind, what JSON can hold, and tensors by name."""

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def send(
    connection: Connection, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes one message, with tensors of any device. OSError if the other end is gone."""
    connection.send_bytes(json.dumps({"kind": kind, "fields": fields}).encode())
    connection.send_bytes(
        save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    )


def receive(connection: Connection) -> Message:
    """Waits for one message. EOFError or OSError if the other end is gone."""
    header = json.loads(connection.recv_bytes())
    return Message(header["kind"], header["fields"], load(connection.recv_bytes()))


def weights_to_bind(
    state: Mapping[str, Tensor], *, adapter: str, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns LoRA tensors as the engine must hold them, with `scale` (alpha / rank) in lora_B."""
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

"""Messages between trainer and engine: a JSON object, and tensors as safetensors.

Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

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

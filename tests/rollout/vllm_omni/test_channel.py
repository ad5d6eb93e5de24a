"""Messages between the trainer and the engine's process; nothing is unpickled."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from flowgrpo_rc.rollout.vllm_omni.channel import receive, send


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ends = [Connection(end.detach()) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_a_message_arrives_as_it_was_sent(pair):
    tensors = {
        "a": torch.randn(2, 3).bfloat16(),
        "b": torch.tensor([2**62, -1]),
        "c": torch.zeros(0, 4),
        "view": torch.arange(6).reshape(2, 3).T,
    }
    fields = {"seeds": [2**62 + 1], "text": 'a "§"', "none": None}
    send(pair[0], "generate", fields, tensors)
    found = receive(pair[1])
    assert (found.kind, found.fields) == ("generate", fields)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


class Intruder:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_nothing_is_unpickled(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair[0].send_bytes(pickle.dumps(Intruder()))
    with pytest.raises(UnicodeDecodeError):
        receive(pair[1])
    pair[0].send_bytes(b'{"kind": "chunk", "fields": {}}')
    pair[0].send_bytes(pickle.dumps(Intruder()))
    with pytest.raises(SafetensorError):
        receive(pair[1])
    assert not Path("unpickled").exists()

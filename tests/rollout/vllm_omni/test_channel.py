"""Messages between trainer and engine, of which nothing is unpickled; the LoRA's fingerprint."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.rollout.vllm_omni.channel import fingerprint, receive, send, weights_to_bind


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


def test_the_engine_gets_scaled_weights_in_its_precision():
    names = ["b.0.to_q.lora_A.default.weight", "b.0.to_q.lora_B.default.weight"]
    a, b = normal((4, 6), [1])[0], normal((5, 4), [2])[0]
    found = weights_to_bind(
        dict(zip(names, (a, b), strict=True)), adapter="default", scale=2.0, dtype=torch.bfloat16
    )
    assert sorted(found) == ["b.0.to_q.lora_A.weight", "b.0.to_q.lora_B.weight"]
    assert torch.equal(found["b.0.to_q.lora_A.weight"], a.bfloat16())
    assert torch.equal(found["b.0.to_q.lora_B.weight"], (2 * b).bfloat16())


def test_the_fingerprint_is_that_of_names_types_shapes_and_bytes():
    tensors = {"b": torch.arange(4.0), "a": torch.ones(1, 2, dtype=torch.bfloat16)}
    expected = hashlib.sha256(
        b"a torch.bfloat16 (1, 2)\n" + b"\x80\x3f" * 2 + b"b torch.float32 (4,)\n"
    )
    expected.update(tensors["b"].numpy().tobytes())
    assert fingerprint(tensors) == expected.hexdigest()
    assert fingerprint(dict(reversed(tensors.items()))) == expected.hexdigest()
    others = [
        {"b": tensors["b"]},
        {**tensors, "b": torch.arange(4.0).reshape(2, 2)},
        {**tensors, "c": torch.zeros(0)},
    ]
    assert len({fingerprint(t) for t in [tensors, *others]}) == 4

"""The LoRA weights that the engine binds, and their fingerprint."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.rollout.vllm_omni.lora import fingerprint, weights_to_bind


def lora(seed: int) -> dict[str, Tensor]:
    shapes = {"b.0.to_q.lora_A.default.weight": (4, 6), "b.0.to_q.lora_B.default.weight": (5, 4)}
    return {name: normal(shape, [seed], name)[0] for name, shape in shapes.items()}


def test_the_engine_gets_scaled_weights_in_its_precision():
    state = lora(1)
    found = weights_to_bind(state, adapter="default", scale=2.0, dtype=torch.bfloat16)
    assert sorted(found) == ["b.0.to_q.lora_A.weight", "b.0.to_q.lora_B.weight"]
    assert torch.equal(
        found["b.0.to_q.lora_A.weight"], state["b.0.to_q.lora_A.default.weight"].bfloat16()
    )
    assert torch.equal(
        found["b.0.to_q.lora_B.weight"], (2 * state["b.0.to_q.lora_B.default.weight"]).bfloat16()
    )


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

"""A copy of the network in bf16 or fp32."""

from __future__ import annotations

import torch

from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.rollout.replica import Replica


def test_a_copy_in_bf16_keeps_the_rotary_frequencies(trained_lm: CausalLM) -> None:
    copy = Replica(trained_lm.network, "bf16").network
    buffers = dict(copy.named_buffers())
    assert {tensor.dtype for tensor in copy.parameters()} == {torch.bfloat16}
    for name, tensor in trained_lm.network.named_buffers():
        assert buffers[name].dtype == torch.float32
        assert torch.equal(buffers[name], tensor)
    shared = Replica(trained_lm.network, "fp32").network
    ours = dict(trained_lm.network.named_parameters())
    theirs = dict(shared.named_parameters())
    assert all((ours[n].data_ptr() == theirs[n].data_ptr()) == ("lora_" not in n) for n in ours)

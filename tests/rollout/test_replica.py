"""A copy of the network in bf16 or fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flowgrpo_rc.distributed.numerics import set_numerics
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import EngineError, check_settings
from flowgrpo_rc.rollout.options.merged_lora import MergedLora, RoundedLora
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


def updated(model: CausalLM) -> dict[str, torch.Tensor]:
    """Returns a LoRA that moves every output."""
    source = torch.Generator().manual_seed(3)
    lora = lora_parameters(model.network)
    return {name: 0.1 * torch.randn(p.shape, generator=source) for name, p in lora.items()}


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.2)])
def test_a_merged_lora_gives_the_outputs_of_a_separate_one(trained_lm, dtype, tolerance):
    tokens = torch.arange(1, 9).reshape(2, 4)
    state = updated(trained_lm)
    at_first, synced = [], []
    for merge in (False, True):
        replica = Replica(trained_lm.network, dtype, [MergedLora()] if merge else [])
        at_first.append(replica.network(tokens).logits.float())
        replica.sync(state)
        synced.append(replica.network(tokens).logits.float())
        assert (synced[-1] - at_first[-1]).abs().max() > 2 * tolerance
    torch.testing.assert_close(*at_first, rtol=0, atol=tolerance)
    torch.testing.assert_close(*synced, rtol=0, atol=tolerance)


def test_a_rounded_lora_stays_apart_and_follows_in_the_rollouts_precision(trained_lm):
    """Beside bf16 weights, which are shared; the trainer's LoRA stays fp32."""
    network = trained_lm.network
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    replica = Replica(network, "bf16", [RoundedLora()])
    state = updated(trained_lm)
    replica.sync(state)
    for name, tensor in state.items():
        assert torch.equal(replica.lora[name], tensor.bfloat16()), name
        assert not torch.equal(replica.lora[name].float(), tensor), name
    trained = dict(network.named_parameters())
    for name, copied in replica.network.named_parameters():
        shared = trained[name].data_ptr() == copied.data_ptr()
        assert (shared, trained[name].dtype) == (
            (False, torch.float32) if name in state else (True, torch.bfloat16)
        )


def test_merging_leaves_the_trainers_weights_alone_and_adds_nothing_up(trained_lm):
    before = {name: p.clone() for name, p in trained_lm.network.named_parameters()}
    replica = Replica(trained_lm.network, "fp32", [MergedLora()])
    tokens = torch.arange(1, 9).reshape(2, 4)
    state = updated(trained_lm)
    replica.sync(state)
    once = replica.network(tokens).logits
    for _ in range(3):
        replica.sync({name: torch.zeros_like(p) for name, p in state.items()})
        replica.sync(state)
    assert torch.equal(replica.network(tokens).logits, once)
    after = dict(trained_lm.network.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    set_numerics(deterministic=False, tf32=False)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_copy_says_whether_it_multiplies_in_tf32(trained_lm: CausalLM, dtype: str) -> None:
    """Products of bf16 matrices do not, so that the setting is nothing to an engine in bf16."""
    replica = Replica(trained_lm.network, dtype)
    config = RolloutConfig(dtype=dtype)
    plain, rounded = config.token_spec(), config.token_spec(tf32=True)
    check_settings(plain, replica.spec(plain))
    if dtype == "fp32":
        with pytest.raises(EngineError, match="tf32: True here, False there"):
            check_settings(rounded, replica.spec(rounded))
    set_numerics(deterministic=False, tf32=True)
    check_settings(rounded, replica.spec(rounded))
    if dtype == "fp32":
        with pytest.raises(EngineError, match="tf32: False here, True there"):
            check_settings(plain, replica.spec(plain))

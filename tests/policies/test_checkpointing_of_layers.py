"""Gradient checkpointing changes nothing in a language model, whatever its layers drop out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from flowgrpo_rc.models.causal_lm import gradient_checkpointing

# Settings of many models, by the value that makes them small.
NAMES = {
    0: ("pad_token_id",),
    2: ("num_hidden_layers", "n_layer", "decoder_layers"),
    4: ("num_attention_heads", "n_head", "decoder_attention_heads", "num_key_value_heads"),
    8: ("head_dim",),
    32: ("hidden_size", "n_embd", "d_model"),
    40: ("vocab_size",),
    48: ("intermediate_size", "ffn_dim"),
}
SIZES = {name: size for size, names in NAMES.items() for name in names}


def tiny(config_class: Any) -> Any:
    """Makes a small configuration with much dropout; what it cannot set stays as it is."""
    default = config_class()
    sizes = {name: value for name, value in SIZES.items() if name in vars(default)}
    drops = {
        name: 0.5
        for name, value in vars(default).items()
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return config_class(**sizes, **drops)


def outcome(network: Any, ids: torch.Tensor, *, checkpointed: bool) -> list[torch.Tensor]:
    """Returns log-probs and the gradients of their sum."""
    network.zero_grad()
    saving = gradient_checkpointing(network) if checkpointed else nullcontext()
    torch.manual_seed(1)
    with saving:
        logits = network(input_ids=ids, use_cache=False).logits
    log_probs = logits.float().log_softmax(-1)
    log_probs[:, :-1].gather(2, ids[:, 1:, None]).sum().backward()
    grads = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    return [log_probs.detach(), *grads]


@pytest.mark.parametrize("model_type", ["biogpt", "gpt2", "llama", "opt", "xglm"])
def test_language_models_with_dropout(model_type: str) -> None:
    ids = torch.randint(3, 39, (2, 7), generator=torch.Generator().manual_seed(0))
    config = tiny(CONFIG_MAPPING[model_type])
    torch.manual_seed(0)
    network = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    plain, saved = (outcome(network, ids, checkpointed=again) for again in (False, True))
    assert len(plain) > 5
    for ours, theirs in zip(plain, saved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

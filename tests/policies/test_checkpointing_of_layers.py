"""Gradient checkpointing changes nothing in a language model, whatever its layers drop out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from flowgrpo_rc.models.causal_lm import gradient_checkpointing

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
# Settings of many models, by the value that makes them small.
NAMES = {
    0: ("pad_token_id",),
    2: ("num_hidden_layers", "n_layer", "decoder_layers", *EXPERTS),
    4: ("num_attention_heads", "n_head", "decoder_attention_heads", "num_key_value_heads"),
    8: ("head_dim",),
    16: ("moe_intermediate_size",),
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


def test_every_language_model_with_dropout() -> None:
    ids = torch.randint(3, 39, (2, 7), generator=torch.Generator().manual_seed(0))
    compared, wrong = [], []
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        # What needs a package, or other sizes than these, is left out.
        try:
            config = tiny(config_class)
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > 2_000_000:
                continue
            torch.manual_seed(0)
            network = model_class(config).eval()
            plain = outcome(network, ids, checkpointed=False)
        except Exception:
            continue
        try:
            saved = outcome(network, ids, checkpointed=True)
            same = all(torch.allclose(*pair, atol=1e-5) for pair in zip(plain, saved, strict=True))
        except Exception as error:
            same = str(error)
        compared.append(config.model_type)
        if same is not True:
            wrong.append((config.model_type, same))
    assert wrong == []
    assert {"opt", "biogpt", "xglm", "gpt2", "llama"} <= set(compared)
    assert len(compared) > 100

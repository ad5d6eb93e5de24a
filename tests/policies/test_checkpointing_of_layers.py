"""Gradient checkpointing changes nothing, in every language model and in every transformer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from flowgrpo_rc.models.causal_lm import gradient_checkpointing

SIZES = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "mamba_chunk_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}


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

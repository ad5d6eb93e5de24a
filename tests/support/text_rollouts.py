"""Small rollouts of the random language model: requests, a LoRA that takes part, samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenBatch, TokenSpec
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.engine import RolloutChunk, TextRequest
from flowgrpo_rc.rollout.transformers_engine import TransformersEngine

TEXTS = ("37+58=", "1+2=", "100+70=")
SPEC = TokenSpec(dtype="fp32", temperature=1.0, prompt_length=8, response_length=6)


def perturb(network: torch.nn.Module, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in lora_parameters(network).items():
        if "lora_B" in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def lora_state(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in lora_parameters(network).items()}


def text_request(spec: TokenSpec, *, texts: Sequence[str] = TEXTS, n: int = 4) -> TextRequest:
    prompts = PromptBatch(
        step=1,
        prompts=[Prompt(text=text, index=i) for i, text in enumerate(texts)],
        slots=range(5, 5 + len(texts)),
    )
    return TextRequest(
        prompts=prompts,
        samples_per_prompt=n,
        spec=spec,
        seeds=list(range(100, 100 + n * len(texts))),
    )


def sample_texts(
    model: CausalLM, spec: TokenSpec = SPEC, *, chunk: int = 3, n: int = 4
) -> tuple[TokenBatch, list[RolloutChunk]]:
    engine = TransformersEngine(model, model.network, dtype=spec.dtype, chunk_size=chunk)
    engine.sync_weights(lora_state(model.network), version=3)
    chunks = list(engine.generate(text_request(spec, n=n)))
    return concat([chunk.batch for chunk in chunks]), chunks

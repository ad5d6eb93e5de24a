"""A language model through transformers: text to tokens and back, and the network between them.

Legend: P prompts, L tokens of the longest prompt, T tokens of the longest response.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowgrpo_rc.libraries import loading
from flowgrpo_rc.models.base import DTYPES
from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.models.index import model_file


class CausalLM:
    """A frozen causal language model and its tokenizer. ValueError if it has no end token.

    Only the end tokens of the checkpoint's generation settings are used. A penalty or a cut that
    its authors advise for sampling would make another distribution than the one that is trained.

    Attributes:
      network: the base network; a rollout has a copy of its own.
      tokenizer: the tokenizer of transformers.
      device: where the network computes.
      eos_ids: the tokens that end a response, from the generation settings and the tokenizer.
      pad_id: the token that fills rows: the tokenizer's, or else the first of eos_ids. Masks, not
        ids, tell what is padding.
    """

    default_target_modules: ClassVar[tuple[str, ...]] = tuple(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )

    def __init__(self, network: Any, tokenizer: Any, device: torch.device) -> None:
        from transformers import GenerationConfig

        self.network = network.to(device).requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.eos_ids = _eos_ids(network.generation_config.eos_token_id, tokenizer.eos_token_id)
        if not self.eos_ids:
            raise ValueError(
                "model.path: neither the tokenizer nor generation_config.json names an "
                "end-of-sequence token, so no response could ever end"
            )
        pad_id = tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad_id is None else int(pad_id)
        network.generation_config = GenerationConfig(
            eos_token_id=list(self.eos_ids), pad_token_id=self.pad_id
        )

    def encode(self, prompts: Sequence[str], *, max_length: int) -> tuple[Tensor, Tensor]:
        """Turns P prompts into tokens, int64 [P, L], padded on the left, and a mask, bool [P, L].

        ValueError if a prompt has no token, or more than `max_length`. No chat template is applied.
        """
        rows = token_rows(self.tokenizer, prompts, max_length=max_length)
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Turns tokens, int64 [B, T], where a mask is True, into texts without special tokens."""
        rows = [
            [token for token in row[kept].tolist() if token not in self.eos_ids]
            for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)
        ]
        texts: list[str] = self.tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts


def token_rows(tokenizer: Any, prompts: Sequence[str], *, max_length: int) -> list[list[int]]:
    """Returns the token ids of each prompt. ValueError if it has none, or too many."""
    rows = [list(tokenizer(prompt).input_ids) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(f"the prompt {prompt!r} has no token: give it a text")
        if len(row) > max_length:
            raise ValueError(
                f"rollout.prompt_length={max_length}, but the prompt {prompt[:60]!r} has "
                f"{len(row)} tokens: raise it or shorten the prompt"
            )
    return rows


def load_tokenizer(config: ModelConfig) -> Any:
    """Loads the tokenizer of a checkpoint, and nothing else of it."""
    from transformers import AutoTokenizer

    model_file(config.path, INDEX_FILES["causal_lm"])
    with _reading(config):
        return AutoTokenizer.from_pretrained(config.location(), trust_remote_code=False)


def load_causal_lm(config: ModelConfig, device: torch.device) -> CausalLM:
    """Loads network and tokenizer from safetensors, without LoRA and code of the checkpoint."""
    from transformers import AutoModelForCausalLM

    with _reading(config):
        network = AutoModelForCausalLM.from_pretrained(
            config.location(),
            dtype=DTYPES[config.dtype],
            use_safetensors=True,
            trust_remote_code=False,
        )
    return CausalLM(network, load_tokenizer(config), device)


@contextmanager
def _reading(config: ModelConfig) -> Iterator[None]:
    with loading(f"model.path={config.path}"):
        try:
            yield
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model.path={config.path}: cannot be read as a causal language model: {error}"
            ) from error


@contextmanager
def gradient_checkpointing(network: Any) -> Iterator[None]:
    """Makes forwards keep only inputs of decoder layers; the backward computes the rest again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    # transformers checkpoints a layer in training mode only, and a network in training mode
    # generates without a cache. So only the layers themselves are in that mode, and only in here.
    # The modules inside of them are not: dropout stays off.
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False
            layer.training = False


def _eos_ids(*given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the given ids, each once, in order."""
    lists = [[ids] if isinstance(ids, int) else ids or () for ids in given]
    return tuple(dict.fromkeys(itertools.chain(*lists)))

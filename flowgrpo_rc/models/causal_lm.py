"""A language model through transformers: text to tokens and back, and the network between them.

Legend: P prompts, L tokens of the longest prompt, T tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowgrpo_rc.models.base import DTYPES, ModelConfig


class CausalLM:
    """A frozen network and its tokenizer. `network` is the base; callers pass the copy they want
    evaluated.

    eos_ids: the tokens that end a response, those of the checkpoint's generation settings and the
        tokenizer's own;
    pad_id: what fills rows, the tokenizer's or else the first of eos_ids (masks, not ids, say what
    is padding). Nothing else of the checkpoint's generation settings is used: a penalty or a cut
    that its authors advise for sampling would make another distribution than the one that is
    trained.
    """

    default_target_modules: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
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
                "end-of-sequence token, so no "
                "response could ever end"
            )
        self.pad_id = (
            self.eos_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        )
        network.generation_config = GenerationConfig(
            eos_token_id=list(self.eos_ids), pad_token_id=self.pad_id
        )

    def encode(self, prompts: Sequence[str], *, max_length: int) -> tuple[Tensor, Tensor]:
        """ids [P, L] int64 padded on the left, and mask [P, L] bool.

        Prompts are taken as they are, with the tokens that the tokenizer itself puts around a text
        (Llama's begin token) and without a chat template: one who wants it applies it when the
        prompt file is written. Raises ValueError for a prompt without any token or with more than
        `max_length`; none is ever cut.
        """
        rows = token_rows(self.tokenizer, prompts, max_length=max_length)
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """The texts of ids [B, T] where mask [B, T] holds, without end tokens and other special
        ones.
        """
        texts = []
        for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
            tokens = [
                token
                for token, keep in zip(row, kept, strict=True)
                if keep and token not in self.eos_ids
            ]
            texts.append(
                self.tokenizer.decode(
                    tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )
        return texts


def token_rows(tokenizer: Any, prompts: Sequence[str], *, max_length: int) -> list[list[int]]:
    """Returns the token ids of each prompt.

    Raises:
      ValueError: a prompt has no token, or more than `max_length`.
    """
    rows = [list(tokenizer(prompt).input_ids) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(f"the prompt {prompt!r} has no token: give it a text")
        if len(row) > max_length:
            raise ValueError(
                f"rollout.prompt_length={max_length}, but the prompt {prompt[:60]!r} has "
                f"{len(row)} tokens: raise "
                "it or shorten the prompt"
            )
    return rows


def load_tokenizer(config: ModelConfig) -> Any:
    """Loads the tokenizer of the checkpoint at `config.path`, and nothing else of it.

    Raises:
      ValueError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_location(config))
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error


def load_causal_lm(config: ModelConfig, device: torch.device) -> CausalLM:
    """Load network (in `config.dtype`) and tokenizer through transformers; only safetensors, no
    code of the checkpoint.

    Raises ValueError for what cannot be read so.
    """
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(
            _location(config), dtype=DTYPES[config.dtype], use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    return CausalLM(network, load_tokenizer(config), device)


def _location(config: ModelConfig) -> str:
    folder = Path(config.path).expanduser()
    return str(folder) if folder.exists() else config.path


def _unreadable(config: ModelConfig, error: Exception) -> ValueError:
    return ValueError(
        f"model.path={config.path}: cannot be read as a causal language model: {error}"
    )


@contextmanager
def gradient_checkpointing(network: Any) -> Iterator[None]:
    """A forward inside keeps only the inputs of the decoder layers; the backward computes the rest
    again.

    transformers checkpoints a layer in training mode only, and then generates without a cache. So
    just the layers themselves, not what is in them, are in that mode, for this one forward: dropout
    stays off, generation untouched.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def _eos_ids(*given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Each once, in order."""
    ids: list[int] = []
    for value in given:
        ids += [] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(ids))

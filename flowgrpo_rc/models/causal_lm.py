"""A language model through transformers: text to tokens and back, and the network between them.

A chat becomes the tokens of the checkpoint's template, `apply_chat_template(tokenize=True)`. A
plain text becomes those of its tokenizer, begin token included, without an end token behind it.

Legend: P prompts, L tokens of the longest prompt, T tokens of the longest response.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    XLNetConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from flowgrpo_rc import reading
from flowgrpo_rc.batch import Said
from flowgrpo_rc.models.base import DTYPES
from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.models.index import model_file
from flowgrpo_rc.models.quantization import quantize_blocks
from flowgrpo_rc.reading import blaming, load_weights, loading, read_mapping

# How config.json calls the number of positions: most models, MPT, decoders of speech.
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
# Scalings of rotary positions whose factor may not be in that number yet.
_STRETCHED = ("linear", "dynamic", "yarn")
_SHOWN = 16  # tokens of either end of a prompt that a reader is shown


class CausalLM:
    """A frozen causal language model and its tokenizer. ValueError if it has no end token.

    Only the end tokens of the checkpoint's generation settings are used. A penalty or a cut that
    its authors advise for sampling would make another distribution than the one that is trained.

    Attributes:
      network: the base network; a rollout has a copy of its own.
      tokenizer: the tokenizer of transformers.
      device: where the network computes.
      eos_ids: the tokens that end a response, from the generation settings and the tokenizer.
      pad_id: the token that fills rows: the tokenizer's if the network knows it, or else the first
        of eos_ids. Masks, not ids, tell what is padding.
      template: options of the chat template, `model.chat_template_kwargs`.
    """

    default_target_modules: ClassVar[tuple[str, ...]] = tuple(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        template: Mapping[str, object] | None = None,
    ) -> None:
        self.network = network.to(device).requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.template = template or {}
        self._vocabulary = len(network.get_input_embeddings().weight)
        ends = network.generation_config.eos_token_id
        eos_ids = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        eos_ids = [end for end in eos_ids if end is not None]
        known = (end for end in eos_ids if type(end) is int and 0 <= end < self._vocabulary)
        self.eos_ids = tuple(dict.fromkeys(known))
        if not self.eos_ids or not all(type(end) is int for end in eos_ids):
            raise ValueError(
                f"model.path: eos_token_id is {eos_ids}, and generation_config.json or the "
                "tokenizer has to name an end-of-sequence token of the model, by whole numbers"
            )
        pad_id = tokenizer.pad_token_id
        is_known = pad_id is not None and int(pad_id) < self._vocabulary
        self.pad_id = int(pad_id) if is_known else self.eos_ids[0]
        network.generation_config = GenerationConfig(
            eos_token_id=list(self.eos_ids), pad_token_id=self.pad_id
        )

    def encode(self, prompts: Sequence[Said], *, max_length: int) -> tuple[Tensor, Tensor]:
        """Turns P prompts into tokens, int64 [P, L], padded on the left, and a mask, bool [P, L].

        ValueError if a prompt has no token, or more than `max_length`, or the template refuses it.
        """
        rows = [
            token_ids(self.tokenizer, prompt, self.template, max_length=max_length)
            for prompt in prompts
        ]
        if (last := max(map(max, rows))) >= self._vocabulary:
            known = f"the network knows {self._vocabulary} tokens"
            raise ValueError(f"model.path: its tokenizer makes token {last}, and {known}")
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Turns tokens, int64 [B, T], where a mask is True, into texts without special tokens."""
        rows = [
            [token for token in row[exists].tolist() if token not in self.eos_ids]
            for row, exists in zip(ids.cpu(), mask.cpu(), strict=True)
        ]
        texts: list[str] = self.tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts


def token_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Said,
    template: Mapping[str, object],
    *,
    max_length: int,
) -> list[int]:
    """Returns the token ids of a prompt. ValueError if it has none, or too many."""
    if isinstance(prompt, str):
        ids = _text_ids(tokenizer, prompt)
    else:
        ids = _chat_ids(tokenizer, prompt, template)
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no token: give it a text")
    if len(ids) > max_length:
        raise ValueError(
            f"rollout.prompt_length={max_length}, but the prompt {str(prompt)[:60]!r} has "
            f"{len(ids)} tokens: raise it or shorten the prompt"
        )
    return ids


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the ids of a text with what the tokenizer puts before it, unless it is there."""
    ids = list(tokenizer(text).input_ids)
    plain = list(tokenizer(text, add_special_tokens=False).input_ids)
    starts = range(len(ids) - len(plain) + 1)
    start = next((n for n in starts if ids[n : n + len(plain)] == plain), None)
    if start is None:  # the text's tokens depend on what stands around them
        return ids
    before = ids[:start]
    return plain if plain[:start] == before else before + plain


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Mapping[str, object]],
    template: Mapping[str, object],
) -> list[int]:
    """Returns the ids that the chat template makes, up to where the model's answer begins."""
    begun = chat[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not begun, "continue_final_message": begun, **template}
    try:
        return list(
            tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=False, **options)
        )
    except Exception as error:  # a template is foreign code
        has_one = tokenizer.chat_template or template.get("chat_template")
        why = f"its chat template fails: {error}" if has_one else "it has no chat template"
        raise ValueError(
            f"model.path: its tokenizer cannot read the chat {str(list(chat))[:80]}, because "
            f"{why}. Change the prompt, or give a template or its options in "
            "model.chat_template_kwargs"
        ) from error


def shown_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Returns the tokens of a prompt for a reader; of a long one, where it begins and ends."""
    tokens = [repr(tokenizer.decode([token])) for token in ids]
    if len(tokens) > 2 * _SHOWN:
        between = f"... {len(tokens) - 2 * _SHOWN} more ..."
        tokens = [*tokens[:_SHOWN], between, *tokens[-_SHOWN:]]
    return f"{len(ids)} tokens: {' '.join(tokens)}"


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint, and nothing else of it."""
    model_file(config.path, INDEX_FILES["causal_lm"])
    where = f"model.path={config.path}"
    return reading.load_tokenizer(AutoTokenizer, config.location(), where, trust_remote_code=False)


def check_context(config: ModelConfig, prompt: int, response: int, most: int | None) -> None:
    """Raises ValueError unless so many tokens of prompt and response have a position.

    config.json says how many the model has; `most` is the limit of the engine, None for none.
    """
    limit = _context(config)
    why = "config.json of model.path"
    if most is not None and (limit is None or most < limit):
        limit = most
        why = f"rollout.engine_kwargs.max_model_len={most}"
    if limit is not None and prompt + response > limit:
        raise ValueError(
            f"rollout.prompt_length={prompt} and rollout.response_length={response} are "
            f"{prompt + response} tokens, but {why} allows {limit} together: lower one of them"
        )


def _context(config: ModelConfig) -> int | None:
    """Returns the positions that config.json gives a model; None where it gives no number."""
    settings = _settings(config).get_text_config(decoder=True)
    numbers = (getattr(settings, name, None) for name in _POSITIONS)
    limit = next((number for number in numbers if isinstance(number, int) and number > 0), None)
    rope = getattr(settings, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") not in _STRETCHED:
        return limit
    trained = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(trained * (rope.get("factor") or 1)))


def check_quantization(config: ModelConfig) -> None:
    """Raises ValueError if `model.quantization` does not suit the model, by config.json."""
    if config.quantization is not None:
        settings = _settings(config)
        with torch.device("meta"), loading(f"model.path={config.path}"):
            network = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        quantize_blocks(network, config.quantization, torch.device("meta"))


def _settings(config: ModelConfig) -> PreTrainedConfig:
    model_file(config.path, INDEX_FILES["causal_lm"])
    with loading(f"model.path={config.path}"):
        return AutoConfig.from_pretrained(config.location(), trust_remote_code=False)


def load_causal_lm(config: ModelConfig, device: torch.device) -> CausalLM:
    """Loads network and tokenizer from safetensors, without LoRA and code of the checkpoint."""
    where = f"model.path={config.path}"
    settings = Path(config.location(), "generation_config.json")
    with blaming(where):
        if settings.is_file():  # transformers would go on without end tokens if it is damaged
            read_mapping(settings)
    network = load_weights(
        AutoModelForCausalLM,
        config.location(),
        where,
        dtype=DTYPES[config.dtype],
        trust_remote_code=False,
    )
    if config.quantization is not None:
        quantize_blocks(network, config.quantization, device)
    model = CausalLM(network, load_tokenizer(config), device, config.chat_template_kwargs)
    if _looks_ahead(network):
        raise ValueError(f"{where}: a {type(network).__name__} sees the tokens it should predict")
    return model


def _looks_ahead(network: PreTrainedModel) -> bool:
    """Returns whether a network's settings let a token see those after it, as BERT's do."""
    settings = network.config.get_text_config(decoder=True)
    if getattr(settings, "use_bidirectional_attention", None) in (True, "all"):
        return True
    masked = type(settings) in MODEL_FOR_MASKED_LM_MAPPING or isinstance(settings, XLNetConfig)
    return masked and not settings.is_decoder


@contextmanager
def gradient_checkpointing(network: nn.Module) -> Iterator[None]:
    """Makes forwards keep only inputs of decoder layers; the backward computes the rest again."""
    layers = [
        module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    # transformers checkpoints a layer in training mode only, in which its own code may drop out. So
    # the forward is replaced, and the mode stays as it is.
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward

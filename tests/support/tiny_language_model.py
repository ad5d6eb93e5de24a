"""A two-layer Llama with random weights, large enough to prefer some of its tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+="
PAD = 0
EOS = 1


def save_language_model(folder: Path) -> None:
    """Saves the model.

    Its generation settings ask for a penalty, which must have no effect, and a second end token,
    which must.
    """
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *CHARACTERS, "<end>"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)
    end = vocabulary["<end>"]
    network.generation_config = GenerationConfig(
        eos_token_id=[end], repetition_penalty=5.0, suppress_tokens=[3]
    )
    network.save_pretrained(folder)

"""Prompts of a language model as tokens: what transformers itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bundled_models.build_tiny_adder_lm import build_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from flowgrpo_rc.models.causal_lm import CausalLM, check_context, load_causal_lm, shown_tokens
from flowgrpo_rc.models.config import ModelConfig

CPU = torch.device("cpu")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '+' if m.role == 'system' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}={% if think %}0{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "1+2"}
SYSTEM = {"role": "system", "content": "12"}


def tokenizer_that_adds(around: str) -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled adder, with special tokens around every text."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": ["<sop>"]})
    names = [name for name in ("<bos>", "<sop>", tokenizer.eos_token) if name in around]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=[(n, tokenizer.convert_tokens_to_ids(n)) for n in names]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read_by(lm: CausalLM, tokenizer: PreTrainedTokenizerFast, prompt: object, **options) -> str:
    lm.network.resize_token_embeddings(len(tokenizer))
    model = CausalLM(lm.network, tokenizer, CPU, options)
    ids, mask = model.encode([prompt], max_length=50)
    assert mask.all()
    return tokenizer.decode(ids[0]).replace(" ", "")


@pytest.mark.parametrize(
    ("around", "text", "read"),
    [
        ("$A", "1+2=", "1+2="),
        ("$A", "<bos>1+2=", "<bos>1+2="),
        ("<bos> $A", "1+2=", "<bos>1+2="),
        ("<bos> $A", "<bos>1+2=", "<bos>1+2="),
        ("<bos> <sop> $A", "1+2=", "<bos><sop>1+2="),
        ("<bos> <sop> $A", "<bos><sop>1+2=", "<bos><sop>1+2="),
        ("$A <eos>", "1+2=", "1+2="),
        ("<bos> $A <eos>", "<bos>1+2=", "<bos>1+2="),
        ("<bos> $A <eos>", "1<eos>2", "<bos>1<eos>2"),
    ],
)
def test_a_text_has_one_beginning_and_no_end(
    lm: CausalLM, around: str, text: str, read: str
) -> None:
    assert read_by(lm, tokenizer_that_adds(around), text) == read


@pytest.mark.parametrize(
    ("chat", "options", "read"),
    [
        ([USER], {}, "<bos>1+2="),
        ([SYSTEM, USER], {}, "<bos>+121+2="),
        ([SYSTEM, USER], {"think": True}, "<bos>+121+2=0"),
        ([USER, {"role": "assistant", "content": "3"}, USER], {}, "<bos>1+231+2="),
        ([USER, {"role": "assistant", "content": "=3"}], {}, "<bos>1+2=3"),
        ([USER], {"add_generation_prompt": False}, "<bos>1+2"),
        ([USER], {"chat_template": "9{{ messages[0].content }}"}, "91+2"),
    ],
)
def test_a_chat_is_what_its_template_makes(
    lm: CausalLM, chat: list[dict[str, str]], options: dict[str, object], read: str
) -> None:
    tokenizer = tokenizer_that_adds("<bos> $A <eos>")
    assert read_by(lm, tokenizer, tuple(chat), **options) == read


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "it has no chat template"),
        ("{{ raise_exception('no system here') }}", "its chat template fails: no system here"),
        ("{{ messages[0].content + 1 }}", "its chat template fails"),
    ],
)
def test_a_chat_that_no_template_takes(lm: CausalLM, template: str | None, words: str) -> None:
    tokenizer = tokenizer_that_adds("$A")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"model\.path: .*{words}.*chat_template_kwargs"):
        read_by(lm, tokenizer, (USER,))


def test_options_of_the_template_come_from_the_settings(tiny_lm: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_lm).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(kind="causal_lm", path=str(tmp_path), chat_template_kwargs={"think": True})
    config.validate()
    model = load_causal_lm(config, CPU)
    assert model.decode(*model.encode([(USER,)], max_length=9)) == ["1+2=0"]
    config.chat_template_kwargs["max_length"] = 3
    with pytest.raises(ValueError, match=r"model\.chat_template_kwargs\.max_length: it is set"):
        config.validate()


def test_a_reader_sees_every_token_of_a_short_prompt_and_both_ends_of_a_long_one() -> None:
    tokenizer = tokenizer_that_adds("<bos> $A")
    assert shown_tokens(tokenizer, tokenizer("1+2").input_ids) == "4 tokens: '<bos>' '1' '+' '2'"
    long = shown_tokens(tokenizer, tokenizer("1" + "2" * 98 + "3").input_ids)
    assert long.startswith("101 tokens: '<bos>' '1' '2' '2'")
    assert "... 69 more ..." in long
    assert long.endswith("'2' '3'")


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (GPT2Config(n_positions=64), 64),
        (MptConfig(max_seq_len=64), 64),
        (Qwen2Config(max_position_embeddings=64), 64),
        (GPTNeoXConfig(max_position_embeddings=64), 64),
        (
            Qwen2Config(
                max_position_embeddings=64,
                rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            ),
            128,
        ),
        (
            Qwen2Config(
                max_position_embeddings=256,
                rope_parameters={"rope_type": "yarn", "factor": 4.0, **ROPE},
            ),
            256,
        ),
    ],
    ids=lambda given: getattr(given, "model_type", str(given)),
)
def test_prompt_and_response_fit_the_positions_of_the_model(
    tmp_path: Path, config: PreTrainedConfig, limit: int
) -> None:
    config.save_pretrained(tmp_path)
    model = ModelConfig(kind="causal_lm", path=str(tmp_path))
    check_context(model, limit - 8, 8, None)
    with pytest.raises(
        ValueError,
        match=rf"rollout\.prompt_length={limit - 7} and rollout\.response_length=8 are "
        rf"{limit + 1} tokens, but config\.json of model\.path allows {limit}",
    ):
        check_context(model, limit - 7, 8, None)
    with pytest.raises(ValueError, match=r"engine_kwargs\.max_model_len=32 allows 32"):
        check_context(model, 30, 8, 32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    check_context(model, 10**6, 10**6, None)  # it has no positions, and so no limit

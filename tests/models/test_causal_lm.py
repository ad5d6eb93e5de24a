"""Language models: encoding with left padding, decoding, end tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.tiny_language_model import EOS, PAD
from transformers import BertConfig, BertLMHeadModel, GenerationConfig

from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import (
    CausalLM,
    check_context,
    load_causal_lm,
    load_tokenizer,
)

CPU = torch.device("cpu")


def test_encode_pads_left_and_never_cuts(lm: CausalLM) -> None:
    ids, mask = lm.encode(["1+2=", "37+58="], max_length=6)
    assert mask.tolist() == [[False] * 2 + [True] * 4, [True] * 6]
    assert ids[0, :2].tolist() == [PAD, PAD]
    assert lm.decode(ids, mask) == ["1+2=", "37+58="]
    with pytest.raises(
        ValueError, match=r"rollout\.prompt_length=5, but the prompt '37\+58=' has 6 tokens"
    ):
        lm.encode(["1+2=", "37+58="], max_length=5)
    with pytest.raises(ValueError, match="the prompt '' has no token"):
        lm.encode([""], max_length=5)


def test_end_and_pad_tokens(lm: CausalLM, tiny_lm: Path) -> None:
    assert lm.eos_ids == (14, EOS)  # those of generation_config.json first, then the tokenizer's
    assert lm.pad_id == PAD
    lm.tokenizer.pad_token = None
    again = CausalLM(lm.network, lm.tokenizer, CPU)
    assert again.pad_id == 14
    lm.tokenizer.eos_token = None
    lm.network.generation_config = GenerationConfig()
    for end in (None, 15, -1):  # of 15 tokens
        lm.network.generation_config = GenerationConfig(eos_token_id=end)
        with pytest.raises(ValueError, match=r"has to name an end-of-sequence token"):
            CausalLM(lm.network, lm.tokenizer, CPU)
    for end in ("1", ["a"], 2.5, [[1]], True):
        lm.network.generation_config.eos_token_id = end
        with pytest.raises(ValueError, match=r"eos_token_id is .* by whole numbers"):
            CausalLM(lm.network, lm.tokenizer, CPU)


def test_tokens_that_the_network_does_not_know(lm: CausalLM) -> None:
    lm.tokenizer.add_tokens(["1+2"])
    lm.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model = CausalLM(lm.network, lm.tokenizer, CPU)
    assert model.pad_id == 14
    model.encode(["37+58="], max_length=6)
    with pytest.raises(ValueError, match=r"its tokenizer makes token 15, and the network knows 15"):
        model.encode(["1+2="], max_length=6)


def test_masked_models_are_refused(tiny_lm: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_lm, tmp_path / "model")
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / "model" / file).unlink()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ModelConfig(kind="causal_lm", path=str(tmp_path / "model"))
    torch.manual_seed(0)
    for decodes in (False, True):
        settings = BertConfig(vocab_size=15, is_decoder=decodes, initializer_range=0.3, **sizes)
        BertLMHeadModel(settings).save_pretrained(config.path)
        if decodes:
            load_causal_lm(config, CPU)
        else:
            with pytest.raises(ValueError, match=r"^model\.path=.*BertLMHeadModel sees the tokens"):
                load_causal_lm(config, CPU)


def test_damaged_settings_are_named(tiny_lm: Path, tmp_path: Path) -> None:
    config = ModelConfig(kind="causal_lm", path=str(tmp_path / "model"))
    shutil.copytree(tiny_lm, config.path)
    (tmp_path / "model" / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"^model\.path=.*generation_config\.json"):
        load_causal_lm(config, CPU)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.path=.*'added_tokens' is missing"):
        load_tokenizer(config)
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace("64", "null"))
    with pytest.raises(ValueError, match=r"^model\.path="):
        check_context(config, 1, 1, None)


def test_decode_drops_ends_and_what_the_mask_leaves_out(lm: CausalLM) -> None:
    ids = torch.tensor([[2, 3, EOS, 9], [14, 5, 5, 5]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert lm.decode(ids, mask) == ["01", ""]


def test_a_folder_that_is_no_language_model(tiny_lm: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_lm / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.path=.*Unrecognized model"):
        load_causal_lm(ModelConfig(kind="causal_lm", path=str(tmp_path)), CPU)

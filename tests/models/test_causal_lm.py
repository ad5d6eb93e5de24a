"""Language models: encoding with left padding, decoding, end tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_language_model import EOS, PAD
from transformers import GenerationConfig

from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm

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
    with pytest.raises(ValueError, match="names an end-of-sequence token"):
        CausalLM(lm.network, lm.tokenizer, CPU)


def test_decode_drops_ends_and_what_the_mask_leaves_out(lm: CausalLM) -> None:
    ids = torch.tensor([[2, 3, EOS, 9], [14, 5, 5, 5]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert lm.decode(ids, mask) == ["01", ""]


def test_a_folder_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"model\.path=.*cannot be read as a causal language model"
    ):
        load_causal_lm(ModelConfig(kind="causal_lm", path=str(tmp_path)), CPU)

"""The exported LoRA of a language model: stock PEFT loads it, and training goes on from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.text_rollouts import lora_state, perturb, sample_texts
from transformers import AutoModelForCausalLM

from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.policies.token import TokenPolicy


# peft asks for this attribute.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("targets", [None, ["q_proj", "layers.1.mlp.up_proj"]])
def test_stock_peft_gives_the_trained_log_probs_bit_for_bit(
    tiny_lm: Path, tmp_path: Path, targets: list[str] | None
) -> None:
    config = ModelConfig(kind="causal_lm", path=str(tiny_lm), lora_rank=4, lora_alpha=6)
    config = replace(config, target_modules=targets, lora_init="default")
    model = load_causal_lm(config, torch.device("cpu"))
    perturb(add_lora(model, config, seed=0))
    batch, _ = sample_texts(model)
    wanted = TokenPolicy(model, model.network).log_probs(batch, 12)
    exported = export_lora(lora_state(model.network), config, tmp_path / "lora")
    assert exported == tmp_path / "lora" / EXPORT_NAMES["causal_lm"]
    names = sorted(path.name for path in exported.parent.iterdir())
    assert names == ["adapter_config.json", exported.name]
    described = json.loads((exported.parent / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == tiny_lm.name
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_lm), exported.parent
    )
    assert torch.equal(TokenPolicy(model, stock).log_probs(batch, 12), wanted)
    stock.set_adapter("default")
    with stock.disable_adapter():
        assert not torch.equal(TokenPolicy(model, stock).log_probs(batch, 12), wanted)


def test_training_goes_on_from_an_exported_lora(
    trained_lm: CausalLM, lm_config: ModelConfig, tmp_path: Path
) -> None:
    exported = export_lora(lora_state(trained_lm.network), lm_config, tmp_path)
    same = replace(lm_config, lora_path=str(tmp_path))
    stronger = replace(lm_config, lora_alpha=12, lora_path=str(exported))

    def loaded(config: ModelConfig) -> dict[str, torch.Tensor]:
        return lora_state(add_lora(load_causal_lm(config, torch.device("cpu")), config, seed=9))

    for config, factor in ((same, 1.0), (stronger, 0.5)):
        state = loaded(config)
        for name, tensor in lora_state(trained_lm.network).items():
            assert torch.equal(state[name], tensor * (factor if "lora_B" in name else 1.0))
    with pytest.raises(ValueError, match=r"model\.lora_rank=8"):
        loaded(replace(same, lora_rank=8))
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | {"use_dora": True}))
    with pytest.raises(ValueError, match=r"config\.json .*sets use_dora=True; only"):
        loaded(same)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"no adapter_config\.json beside adapter_model"):
        loaded(same)
    exported.unlink()
    with pytest.raises(ValueError, match=r"there is no adapter_model\.safetensors"):
        loaded(same)

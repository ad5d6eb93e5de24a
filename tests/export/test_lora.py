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

from flowgrpo_rc.export.lora import export_lora
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
    config = ModelConfig(
        kind="causal_lm",
        path=str(tiny_lm),
        lora_rank=4,
        lora_alpha=6,
        target_modules=targets,
        lora_init="default",
    )
    model = load_causal_lm(config, torch.device("cpu"))
    perturb(add_lora(model, config, seed=0))
    batch, _ = sample_texts(model)
    wanted = TokenPolicy(model, model.network).log_probs(batch, 12)
    exported = export_lora(lora_state(model.network), config, tmp_path / "lora")
    assert exported == tmp_path / "lora" / EXPORT_NAMES["causal_lm"]
    assert sorted(path.name for path in exported.parent.iterdir()) == [
        "adapter_config.json",
        exported.name,
    ]
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
    found = lora_state(add_lora(load_causal_lm(same, torch.device("cpu")), same, seed=9))
    assert all(
        torch.equal(found[name], tensor) for name, tensor in lora_state(trained_lm.network).items()
    )
    stronger = replace(lm_config, lora_alpha=12, lora_path=str(exported))
    found = lora_state(add_lora(load_causal_lm(stronger, torch.device("cpu")), stronger, seed=9))
    for name, tensor in lora_state(trained_lm.network).items():
        assert torch.equal(found[name], tensor * (0.5 if "lora_B" in name else 1.0))
    wide = replace(same, lora_rank=8)
    with pytest.raises(ValueError, match=r"model\.lora_rank=8"):
        add_lora(load_causal_lm(wide, torch.device("cpu")), wide, seed=0)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | {"use_rslora": True}))
    with pytest.raises(ValueError, match=r"sets use_rslora; only a plain LoRA"):
        add_lora(load_causal_lm(same, torch.device("cpu")), same, seed=0)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"no adapter_config\.json beside adapter_model"):
        add_lora(load_causal_lm(same, torch.device("cpu")), same, seed=0)
    exported.unlink()
    with pytest.raises(ValueError, match=r"there is no adapter_model\.safetensors"):
        add_lora(load_causal_lm(same, torch.device("cpu")), same, seed=0)

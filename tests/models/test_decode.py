"""Samples are decoded some at a time, however many there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.rollout.config import RolloutConfig


@pytest.mark.parametrize(("size", "decoded"), [(2, [2, 2, 1]), (5, [5]), (9, [5]), (None, [5])])
def test_the_vae_gets_no_more_at_once(checkpoint, model, monkeypatch, size, decoded):
    settings = ModelConfig(path=str(checkpoint), decode_batch_size=size)
    limited = load_model(settings, torch.device("cpu"))
    vae = limited.pipeline.vae
    decode = vae.decode
    seen = []

    def noting(latents: Tensor, *given: Any, **options: Any) -> Any:
        seen.append(len(latents))
        return decode(latents, *given, **options)

    monkeypatch.setattr(vae, "decode", noting)
    latents = normal((8, 8, 16), range(5))
    spec = RolloutConfig().spec()
    images = limited.decode(latents, spec)
    assert seen == decoded
    apart = np.abs(images.astype(int) - model.decode(latents, spec))
    assert apart.max() <= 1  # batches of other sizes may round otherwise


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode_batch_size": 0}, "model.decode_batch_size=0: give at least 1"),
        ({"decode_batch_size": 2, "kind": "causal_lm"}, "model.decode_batch_size=2 has no effect"),
        ({"offload_idle": True, "kind": "causal_lm"}, "model.offload_idle=true has no effect"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        ModelConfig(path="x/y", **settings).validate()

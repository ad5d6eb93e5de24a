"""Parts that work now and then are on the device only during a call, and decode some at a time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from support.image_rollouts import make_spec
from torch import Tensor, nn

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models import offload
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.offload import Offloadable
from flowgrpo_rc.policies.encode_prompts import encode_prompts
from flowgrpo_rc.rollout.config import RolloutConfig

CPU = torch.device("cpu")  # a copy stands for being on a device


class Part(nn.Module):
    """A frozen module with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("scale", torch.arange(2.0))

    @property
    def places(self) -> list[int]:
        assert self.weight.tolist() == [0.0, 1.0, 2.0]
        assert self.scale.tolist() == [0.0, 1.0]
        return [self.weight.data_ptr(), self.scale.data_ptr()]


def test_parts_are_on_the_device_until_the_last_user_has_left() -> None:
    """Also if the work fails; they are copied for each stay, and dropped after it, or stay."""
    part = Part()
    at_home = part.places
    parted = Offloadable([part], CPU, offload=True)
    for _ in range(2):
        with suppress(KeyError), parted.at_work():
            there = part.places
            assert not set(there) & set(at_home)
            with parted.at_work():
                assert part.places == there
            assert part.places == there
            raise KeyError("x")
        assert part.places == at_home
    with Offloadable([part], CPU, offload=False).at_work():
        assert part.places == at_home


def test_a_models_encoders_and_its_vae_travel(checkpoint, model, monkeypatch):
    """Encoders make one trip for prompts and negatives, the VAE one for a decoding; the transformer
    stays.
    """
    offloaded = load_model(ModelConfig(path=str(checkpoint), offload_idle=True), CPU)
    parts = {
        name: part
        for name, part in offloaded.pipeline.components.items()
        if isinstance(part, nn.Module)
    }
    trips: list[set[str]] = []
    leave = Offloadable._leave

    def noted(self: Offloadable) -> None:
        moved = {id(tensor) for tensor, _ in self._on_host}
        names = {name for name, part in parts.items() if id(next(part.parameters())) in moved}
        trips.extend([names] if names else [])
        leave(self)

    monkeypatch.setattr(Offloadable, "_leave", noted)
    prompts, spec = [Prompt(text="A", index=0)], make_spec("sde", 2.0)
    found, expected = (encode_prompts(each, prompts, spec) for each in (offloaded, model))
    assert trips == [{"text_encoder", "text_encoder_2", "text_encoder_3"}]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.embeds, theirs.embeds)
    latents = normal((8, 8, 16), [1])
    assert np.array_equal(offloaded.decode(latents, spec), model.decode(latents, spec))
    assert trips[1:] == [{"vae"}]


@pytest.mark.parametrize("block", [1, 600, 2**20])
def test_tensors_share_blocks_of_the_host(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is full before the next one begins; a larger tensor has one of its own."""
    monkeypatch.setattr(offload, "BLOCK", block)
    tensors = [
        torch.randn(3, 5),  # 60 bytes, which take 256
        torch.arange(7, dtype=torch.int8),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(400).bfloat16(),
        torch.randn(4, 6).t(),
    ]
    copies = list(offload.packed(tensors, pin=False))
    for copied, tensor in zip(copies, tensors, strict=True):
        assert copied.dtype == tensor.dtype
        assert torch.equal(copied, tensor)
    blocks = {copied.untyped_storage().data_ptr() for copied in copies}
    assert len(blocks) == {1: 5, 600: 4, 2**20: 1}[block]
    assert {copied.data_ptr() % 64 for copied in copies} == {0}


@pytest.mark.parametrize(("size", "decoded"), [(2, [2, 2, 1]), (9, [5])])
def test_the_vae_gets_no_more_at_once(model, monkeypatch, size, decoded):
    limited = type(model)(model.pipeline, CPU, decode_batch_size=size)
    vae = limited.pipeline.vae
    decode = vae.decode
    sizes = []

    def noting(latents: Tensor, **options: Any) -> Any:
        sizes.append(len(latents))
        return decode(latents, **options)

    latents = normal((8, 8, 16), range(5))
    spec = RolloutConfig().spec()
    whole = model.decode(latents, spec)
    monkeypatch.setattr(vae, "decode", noting)
    images = limited.decode(latents, spec)
    assert sizes == decoded
    apart = np.abs(images.astype(int) - whole)
    assert apart.max() <= 1  # batches of other sizes may round otherwise


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode_batch_size": 0}, "model.decode_batch_size=0: give at least 1"),
        ({"decode_batch_size": 2, "kind": "causal_lm"}, "model.decode_batch_size=2 has no effect"),
        ({"offload_idle": True, "kind": "causal_lm"}, "model.offload_idle=true has no effect"),
        ({"offload_idle": "layers", "kind": "causal_lm"}, "model.offload_idle=layers has no"),
        ({"offload_idle": "blocks"}, "model.offload_idle=blocks: give true, false or layers"),
        ({"prompt_cache": "disk"}, "model.prompt_cache=disk: give memory, or a folder"),
        ({"prompt_cache": __file__}, f"model.prompt_cache={__file__}: give memory, or a folder"),
        ({"prompt_cache": "memory", "kind": "causal_lm"}, "model.prompt_cache=memory has no"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        ModelConfig(path="x/y", **settings).validate()

"""Parts that work now and then are on the device only during a call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models import base
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.offload import Offloadable
from flowgrpo_rc.rollout.config import RolloutConfig

GPU = torch.device("cuda", 0)


class Traveller(nn.Module):
    """Records where it is sent instead of going there."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device) -> Traveller:  # type: ignore[override]
        self.places.append(device.type)
        return self


def test_idle_parts_are_off_the_device() -> None:
    parts = [Traveller(), Traveller()]
    parted = Offloadable(parts, GPU, offload=True)
    assert [part.places for part in parts] == [["cpu"]] * 2
    with parted.at_work():
        assert [part.places[-1] for part in parts] == ["cuda", "cuda"]
    assert [part.places for part in parts] == [["cpu", "cuda", "cpu"]] * 2


def test_parts_leave_the_device_after_a_failure_as_well() -> None:
    part = Traveller()
    with pytest.raises(KeyError), Offloadable([part], GPU, offload=True).at_work():
        raise KeyError("x")
    assert part.places == ["cpu", "cuda", "cpu"]


def test_without_offloading_parts_stay_on_the_device() -> None:
    part = Traveller()
    with Offloadable([part], GPU, offload=False).at_work():
        pass
    assert part.places == ["cuda"]


def test_a_models_encoders_and_its_vae_travel(
    checkpoint: Path, model: FlowModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders are on the device for `encode`, the VAE for `decode`; the transformer stays
    there.
    """
    journeys: list[tuple[str, str]] = []
    move = nn.Module.to

    def noting(self: nn.Module, device: torch.device) -> nn.Module:
        journeys.append((type(self).__name__, str(device)))
        return move(self, device)

    monkeypatch.setattr(base.nn.Module, "to", noting)
    offloaded = load_model(
        ModelConfig(path=str(checkpoint), offload_idle=True), torch.device("cpu")
    )
    journeys.clear()
    conditioning = offloaded.encode(["A"], max_sequence_length=16)
    assert sorted({name for name, _ in journeys}) == [
        "CLIPTextModelWithProjection",
        "T5EncoderModel",
    ]
    assert torch.equal(conditioning.embeds, model.encode(["A"], max_sequence_length=16).embeds)
    journeys.clear()
    latents = normal((8, 8, 16), [1])
    spec = RolloutConfig().spec()
    assert np.array_equal(offloaded.decode(latents, spec), model.decode(latents, spec))
    assert {name for name, _ in journeys} == {"AutoencoderKL"}


def test_text_has_nothing_to_offload() -> None:
    with pytest.raises(
        ValueError, match=r"model\.offload_idle=true has no effect with model\.kind=causal_lm"
    ):
        ModelConfig(kind="causal_lm", path="x/y", offload_idle=True).validate()

"""A Wan whose transformers share the schedule: which one computes what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.subjects import Subject, make_subject
from support.tiny_models import TINY, one_step_unipc, wan

from flowgrpo_rc.batch import Conditioning
from flowgrpo_rc.calibration.measure import with_guidance
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.layout import input_dtype
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.models.wan_two_stage import WanTwoStage
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.replica import Replica

NAME = "WanPipeline+transformer_2"


@pytest.fixture
def subject(saved: Callable[[str], Path]) -> Subject:
    return make_subject(NAME, saved)


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_each_step_goes_to_the_transformer_that_the_stock_pipeline_runs(scheduler: str) -> None:
    with torch.random.fork_rng():
        given = {} if scheduler == "euler" else {"scheduler": one_step_unipc}
        stock = wan(boundary_ratio=0.875, **given)
    stock.set_progress_bar_config(disable=True)
    ran: list[str] = []
    for name in ("transformer", "transformer_2"):
        part = getattr(stock, name)
        part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    stock("a", height=32, width=32, num_frames=1, num_inference_steps=8, guidance_scale=1.0)
    model = WanTwoStage(stock, torch.device("cpu"))
    tiny = TINY[NAME]
    spec = tiny.spec("sde", tiny.unguided, num_inference_steps=8)
    assert set(ran) == {"transformer", "transformer_2"}
    assert model.networks_of_steps(spec) == ran


def test_a_timestep_at_the_boundary_belongs_to_the_first_transformer(subject: Subject) -> None:
    model = subject.load()
    velocity = velocities(model, subject)
    at, below = velocity([800.0]), velocity([799.0])
    with torch.no_grad():
        for parameter in model.pipeline.transformer_2.parameters():
            parameter.zero_()
    assert torch.equal(velocity([800.0]), at)
    assert not torch.allclose(velocity([799.0]), below)


@pytest.mark.parametrize("timesteps", [[900.0, 300.0, 800.0], [100.0, 950.0, 200.0]])
def test_rows_on_both_sides_are_what_they_are_alone(subject, timesteps):
    model = subject.load()
    velocity = velocities(model, subject, rows=3)
    alone = [velocity([timestep], row) for row, timestep in enumerate(timesteps)]
    torch.testing.assert_close(velocity(timesteps), torch.cat(alone), atol=1e-5, rtol=1e-5)


def velocities(model: Any, subject: Subject, rows: int = 1) -> Callable[..., torch.Tensor]:
    """Returns the guided velocity of rows that differ, by their timesteps."""
    tiny = subject.tiny
    spec = tiny.spec("sde", tiny.guided)
    latents = normal(model.latent_shape(spec), list(range(rows)), "latents")
    texts = ["a red cat", "two", "a house at night"][:rows]
    text = model.encode(texts, max_sequence_length=16)
    blank = model.encode(["blur"] * rows, max_sequence_length=16)

    def velocity(timesteps: list[float], row: int = 0) -> torch.Tensor:
        here = slice(row, row + len(timesteps))

        def of(whole: Conditioning) -> Conditioning:
            return whole[torch.arange(rows)[here]]

        with torch.no_grad():
            return model.velocity(
                model.network, latents[here], torch.tensor(timesteps), of(text), of(blank), spec
            )

    return velocity


def test_one_of_the_transformers_is_no_policy(subject: Subject) -> None:
    model = subject.load()
    with pytest.raises(ValueError, match=r"the network has transformer: give model\.network"):
        FlowPolicy(model, model.transformer)


def test_a_replica_converts_or_shares_the_weights_of_both(subject: Subject) -> None:
    network = add_lora(subject.load(), subject.config(), seed=0)
    weights = [part.proj_out.weight for part in transformers(network).values()]
    copies = transformers(Replica(network, "fp32").network).values()
    for part, weight in zip(copies, weights, strict=True):
        assert part.proj_out.weight is weight
    rounded = transformers(Replica(network, "bf16").network)
    assert [input_dtype(part) for part in rounded.values()] == [torch.bfloat16] * 2


def test_training_goes_on_from_both_files_of_an_export(subject: Subject, tmp_path: Path) -> None:
    config = subject.config()
    network = add_lora(subject.load(), config, seed=0)
    source = torch.Generator().manual_seed(1)
    for parameter in lora_parameters(network).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source))
    state = {name: p.detach() for name, p in lora_parameters(network).items()}
    exported = export_lora(state, config, tmp_path)
    assert exported == tmp_path / "pytorch_lora_weights.safetensors"
    second = tmp_path / "transformer_2" / exported.name
    files = [load_file(path) for path in (exported, second)]
    assert files[0].keys() == files[1].keys()
    assert all(key.startswith("transformer.blocks.") for key in files[0])
    assert not any(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())

    again = add_lora(subject.load(), subject.config(lora_path=str(tmp_path)), seed=5)
    found = lora_parameters(again)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with pytest.raises(ValueError, match=r"LoRA of one transformer, and the model has 2: give the"):
        add_lora(subject.load(), subject.config(lora_path=str(exported)), seed=0)
    second.unlink()
    with pytest.raises(ValueError, match=r"there is no transformer_2/pytorch_lora_weights"):
        add_lora(subject.load(), subject.config(lora_path=str(tmp_path)), seed=0)


@pytest.mark.parametrize(("scale", "second"), [(1.0, 1.0), (5.0, 3.0), (3.0, 2.0)])
def test_a_fault_of_the_guidance_moves_both_scales(scale: float, second: float) -> None:
    tiny = TINY[NAME]
    moved = with_guidance(tiny.spec("sde", tiny.guided), "guidance_scale", scale)
    assert (moved.guidance_scale, moved.guidance_scale_2) == (scale, second)
    alone = with_guidance(tiny.spec("sde", tiny.unguided), "guidance_scale", scale)
    assert (alone.guidance_scale, alone.guidance_scale_2) == (scale, None)

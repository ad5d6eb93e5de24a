"""VllmOmniEngine on the real vLLM-Omni, on a CPU: `make test-vllm-omni`.

Skipped unless vLLM-Omni is installed. The oracles are the stock diffusers pipelines, the diffusers
engine, and `FlowPolicy`, with which the trainer computes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from support.tiny_models import TINY, Tiny, wan
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import EngineError, ImageRequest, RolloutChunk, RolloutEngine
from flowgrpo_rc.rollout.vllm_omni.channel import fingerprint, weights_to_bind
from flowgrpo_rc.rollout.vllm_omni_engine import PIPELINES, VllmOmniEngine

if find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni is not installed", allow_module_level=True)

# Of different lengths, so that Qwen-Image's masks count, and one of them for Wan to clean.
TEXTS = ('"AB7X"', "an &quot;HI&quot;", '"K9Q"')
STEPS = 4
SIZE = {"height": 32, "width": 64}
CONFIG = ModelConfig(lora_rank=4, lora_alpha=8)
TIMES = {"timeout_s": 120.0, "start_timeout_s": 300.0}
SAME = 1e-5  # latents that differ by less are the same up to rounding


def wan_with_wider_heads() -> WanPipeline:
    """The tiny Wan with heads of another width.

    vLLM-Omni divides the width of a head among three axes as diffusers does only where it is 0, 1
    or 2 more than a multiple of 6, as the published 128 is and the tiny 16 is not.
    """
    pipeline = wan()
    pipeline.transformer = WanTransformer3DModel.from_config(
        pipeline.transformer.config, attention_head_dim=18
    )
    return pipeline


CHECKPOINTS = TINY | {"WanPipeline": replace(TINY["WanPipeline"], build=wan_with_wider_heads)}


@dataclass
class Case:
    """One family: the trainer's model with its LoRA, the engine, and the diffusers engine in the
    same precision.
    """

    tiny: Tiny
    model: FlowModel
    engine: VllmOmniEngine
    diffusers: DiffusersEngine

    def push(self, version: int) -> None:
        """Gives a LoRA for each version to the trainer and both engines; version 0 has no
        effect.
        """
        state = lora(self.model, version)
        for name, parameter in lora_parameters(self.model.network).items():
            parameter.data.copy_(state[name])
        for engine in (self.engine, self.diffusers):
            engine.sync_weights(state, version)


def lora(model: FlowModel, version: int) -> dict[str, Tensor]:
    scale = 0.05 if version else 0.0
    return {
        n: scale * normal(p.shape, [version], n)[0]
        for n, p in lora_parameters(model.network).items()
    }


def open_case(family: str, folder: Path, dtype: str) -> Iterator[Case]:
    tiny = CHECKPOINTS[family]
    tiny.save(folder)
    model = load_model(replace(CONFIG, path=str(folder)), torch.device("cpu"))
    network = add_lora(model, CONFIG, seed=0)
    engine = VllmOmniEngine(model, network, dtype=dtype, chunk_size=4, **TIMES)
    case = Case(tiny, model, engine, DiffusersEngine(model, network, dtype=dtype, chunk_size=4))
    case.push(1)
    yield case
    engine.close()


@pytest.fixture(scope="module", params=PIPELINES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    yield from open_case(request.param, tmp_path_factory.mktemp(request.param), "fp32")


@pytest.fixture(scope="module", params=PIPELINES)
def bf16(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    yield from open_case(request.param, tmp_path_factory.mktemp(request.param), "bf16")


def request_of(
    spec: SamplerSpec, seeds: Sequence[int], window: Sequence[int], texts: Sequence[str] = TEXTS
) -> ImageRequest:
    return ImageRequest(
        prompts=PromptBatch(
            step=1,
            prompts=[
                Prompt(text=text, index=i, negative_text="blur") for i, text in enumerate(texts)
            ],
            slots=range(len(texts)),
        ),
        samples_per_prompt=len(seeds) // len(texts),
        spec=spec,
        seeds=seeds,
        window=torch.tensor(window).expand(len(seeds), len(window)),
        keep_means=True,
    )


SEEDS = [derive_seed(0, row) for row in range(6)]
WINDOW = (0, 1)  # the third of four steps ends at sigma 0.001, where cps has next to no noise


def sample(
    engine: RolloutEngine[ImageRequest], request: ImageRequest
) -> tuple[DiffusionBatch, list[RolloutChunk]]:
    chunks = list(engine.generate(request))
    return concat([chunk.batch for chunk in chunks]), chunks


def mismatch(case: Case, batch: DiffusionBatch) -> Tensor:
    """Returns |trainer's log-probs - engine's| [B, T]."""
    with torch.no_grad():
        return (
            FlowPolicy(case.model, case.model.network).log_probs(batch, 4) - batch.rollout_log_probs
        ).abs()


@pytest.mark.parametrize("guidance", ["unguided", "guided"])
def test_images_are_those_of_the_stock_pipeline(case: Case, guidance: str) -> None:
    scales = vars(case.tiny)[guidance]
    spec = case.tiny.spec("sde", scales, noise_level=0.0)
    seeds = SEEDS[:3]
    batch, (chunk,) = sample(case.engine, request_of(spec, seeds, range(STEPS)))
    latents = normal(case.model.latent_shape(spec), seeds, "latents")
    settings = stock_settings(case, spec, scales, guidance == "guided")
    wanted = case.model.pipeline(latents=latents, output_type="latent", **settings)[0]
    images = case.model.pipeline(latents=latents, output_type="np", **settings)[0]
    found = case.tiny.stock_latents(case.model, batch.all_latents[:, -1])
    difference = (found - wanted).abs().max().item()
    print(
        f"{case.model.pipeline_class} {guidance}: latents differ by {difference:.1e} from the "
        "stock pipeline's"
    )
    assert difference < SAME
    assert abs(chunk.samples / 255 - images).max() <= 0.5 / 255 + 1e-5


def stock_settings(
    case: Case, spec: SamplerSpec, scales: Mapping[str, float], guided: bool
) -> dict[str, Any]:
    """Returns what the stock pipeline is called with, besides latents and kind of output."""
    pipeline = case.model.pipeline
    settings: dict[str, Any] = {
        "prompt": list(TEXTS),
        "num_inference_steps": STEPS,
        "max_sequence_length": spec.max_sequence_length,
        "return_dict": False,
        **SIZE,
        **scales,
    }
    if spec.num_frames is not None:
        settings["num_frames"] = spec.num_frames
    negative = ["blur"] * len(TEXTS)
    if "negative_prompt" in signature(pipeline.__call__).parameters:
        settings["negative_prompt"] = negative
    elif guided:
        embeds, _ = pipeline.encode_prompt(negative, max_sequence_length=spec.max_sequence_length)
        settings["negative_prompt_embeds"] = embeds
    return settings


@pytest.mark.parametrize("guidance", ["unguided", "guided"])
@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_batch_is_that_of_the_diffusers_engine(case: Case, kind: str, guidance: str) -> None:
    request = request_of(case.tiny.spec(kind, vars(case.tiny)[guidance]), SEEDS, WINDOW)
    found, chunks = sample(case.engine, request)
    expected, others = sample(case.diffusers, request)
    assert (
        [len(chunk.batch) for chunk in chunks] == [len(chunk.batch) for chunk in others] == [4, 2]
    )
    for field in dataclasses.fields(DiffusionBatch):
        mine = getattr(found, field.name)
        theirs = getattr(expected, field.name)
        if field.name == "prev_sample_mean":
            mean = mine
        elif isinstance(theirs, Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
            assert (
                mine.equal(theirs)
                if not mine.is_floating_point()
                else (mine - theirs).abs().max() < SAME
            ), field.name
        elif field.name in ("conditioning", "negative") and theirs is not None:
            for name in ("embeds", "pooled", "mask"):
                mine_part = getattr(mine, name)
                their_part = getattr(theirs, name)
                assert (mine_part is None) == (their_part is None), (field.name, name)
                assert (
                    their_part is None
                    or (mine_part.float() - their_part.float()).abs().max() < SAME
                )
        else:
            assert mine == theirs, field.name
    policy = FlowPolicy(case.model, case.model.network)
    assert (policy.transition(found.step(1)).mean - mean[:, 1]).abs().max() < SAME
    for chunk, other in zip(chunks, others, strict=True):
        assert abs(chunk.samples.astype(int) - other.samples).max() <= 1
        assert chunk.prompts == other.prompts
    assert found.spec == replace(request.spec, dtype="fp32")


def test_a_sample_follows_its_seed_and_not_its_batch(case: Case) -> None:
    spec = case.tiny.spec("sde", case.tiny.unguided)
    text = TEXTS[:1]
    together, _ = sample(case.engine, request_of(spec, SEEDS[:4], WINDOW, text))
    again, _ = sample(case.engine, request_of(spec, SEEDS[:4], WINDOW, text))
    backwards, _ = sample(case.engine, request_of(spec, SEEDS[:4][::-1], WINDOW, text))
    alone = [sample(case.engine, request_of(spec, [seed], WINDOW, text))[0] for seed in SEEDS[:4]]
    assert torch.equal(together.all_latents, again.all_latents)
    assert torch.equal(together.rollout_log_probs, again.rollout_log_probs)
    for other in (concat(alone), backwards.select(torch.tensor([3, 2, 1, 0]))):
        assert (together.all_latents - other.all_latents).abs().max() < SAME
        assert (together.rollout_log_probs - other.rollout_log_probs).abs().max() < 1e-6
    assert (together.all_latents[0] - together.all_latents[1]).abs().max() > 0.1


def test_a_pushed_lora_is_that_of_peft(case: Case) -> None:
    request = request_of(case.tiny.spec("sde", case.tiny.guided), SEEDS, WINDOW)
    latents = {}
    for version in (0, 2, 3):
        case.push(version)
        found, _ = sample(case.engine, request)
        expected, _ = sample(case.diffusers, request)
        assert (found.all_latents - expected.all_latents).abs().max() < SAME
        assert set(found.policy_version.tolist()) == {version}
        latents[version] = found.all_latents
    assert (latents[0] - latents[2]).abs().max() > 10 * SAME
    assert (latents[3] - latents[2]).abs().max() > 10 * SAME
    case.push(1)


def test_the_child_has_vllm_and_the_trainer_its_process_group(case: Case) -> None:
    assert not {"vllm", "vllm_omni"} & sys.modules.keys()
    environment = (
        Path(f"/proc/{case.engine._process.pid}/environ").read_bytes().decode().split("\0")
    )
    assert not [
        entry
        for entry in environment
        if entry.startswith(("RANK=", "WORLD_SIZE=", "MASTER_", "LOCAL_RANK="))
    ]
    assert os.getpgid(case.engine._process.pid) != os.getpgid(0)


def test_a_stale_lora_is_caught(case: Case) -> None:
    """The engine ends with the error, so this is the last test of `case`."""
    request = request_of(case.tiny.spec("sde", case.tiny.unguided), SEEDS[:3], WINDOW)
    stale = lora(case.model, 5)
    tensors = weights_to_bind(stale, adapter="default", scale=2.0, dtype=torch.float32)
    (reply,) = case.engine._process.ask("sync", {"version": 5, "rank": CONFIG.lora_rank}, tensors)
    assert reply.fields == {"modules": len(stale) // 2, "fingerprint": fingerprint(tensors)}
    with pytest.raises(
        EngineError, match=r"does not hold the LoRA of step 1: it bound (\d+) of \1 modules"
    ):
        sample(case.engine, request)
    assert not Path(f"/proc/{case.engine._process.pid}").exists()


def test_bf16_shows_its_gap(bf16: Case) -> None:
    for guidance in ("unguided", "guided"):
        batch, _ = sample(
            bf16.engine,
            request_of(
                bf16.tiny.spec("sde", vars(bf16.tiny)[guidance], dtype="bf16"), SEEDS, WINDOW
            ),
        )
        gap = mismatch(bf16, batch)
        print(
            f"{bf16.model.pipeline_class} bf16 {guidance}: |difference| mean {gap.mean():.1e}, max "
            f"{gap.max():.1e}"
        )
        assert batch.spec.dtype == "bf16"
        assert batch.all_latents.dtype == torch.float32
        assert 1e-5 < gap.mean() < 1e-2


def test_a_lora_that_binds_nothing_is_an_error(bf16: Case) -> None:
    """It ends the engine, as every error does; the next engine may be started in its place."""
    elsewhere = {
        f"vision.{name}": tensor.bfloat16() for name, tensor in lora(bf16.model, 2).items()
    }
    tensors = {name.replace(".default.", "."): tensor for name, tensor in elsewhere.items()}
    with pytest.raises(EngineError, match=r"failed in 'sync': .*binding is incomplete: bound=0/"):
        list(bf16.engine._process.ask("sync", {"version": 2, "rank": CONFIG.lora_rank}, tensors))


def test_a_quantization_that_does_nothing_is_an_error(tmp_path: Path) -> None:
    """`VllmOmniEngine.check` refuses fp8 for this family; here nobody has asked it."""
    CHECKPOINTS["StableDiffusion3Pipeline"].save(tmp_path)
    model = load_model(replace(CONFIG, path=str(tmp_path)), torch.device("cpu"))
    network = add_lora(model, CONFIG, seed=0)
    with pytest.raises(EngineError, match=r"quantization=fp8: none of the [1-9]\d+ layers"):
        VllmOmniEngine(model, network, dtype="bf16", chunk_size=4, quantization="fp8", **TIMES)

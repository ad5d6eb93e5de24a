"""What every adapter must do, on a random checkpoint of its pipeline's class (`tiny_models`).

A new adapter is found by its file. It takes part as soon as `tiny_models.TINY` has a checkpoint for
it.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from support.image_rollouts import trained_lora
from support.marks import slow
from support.subjects import Subject, make_subject
from support.text_rollouts import lora_state, perturb
from support.tiny_models import VARIANTS, Tiny
from torch import nn

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.config.names import config_folder
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline
from flowgrpo_rc.models.index import component_dtype
from flowgrpo_rc.models.layout import input_dtype
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.policies.encode_prompts import encode_prompts, encode_unique
from flowgrpo_rc.policies.flow import FlowPolicy, no_window
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.rollout.options.merged_lora import MergedLora, RoundedLora
from flowgrpo_rc.rollout.options.option import RolloutOption

# Mean |difference| of a bf16 rollout's log-probs in units of a Gaussian step; random weights, three
# steps.
BF16_BOUND = 2e-3


@pytest.fixture(params=sorted(adapters_by_pipeline()))
def subject(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Subject:
    """Each pipeline that has an adapter, with a random checkpoint."""
    return make_subject(request.param, saved)


@pytest.fixture(params=sorted({*adapters_by_pipeline(), *VARIANTS}))
def any_subject(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Subject:
    return make_subject(request.param, saved)


def prompts_for(tiny: Tiny) -> list[Prompt]:
    return [
        Prompt(text=text, index=i, target=text[1:-1], negative_text=blur, images=tiny.images(i))
        for i, (text, blur) in enumerate([('"AB7X"', "a blur"), ('"HI"', "")])
    ]


def roll(
    model: FlowModel,
    network: nn.Module,
    tiny: Tiny,
    *,
    decode: bool = False,
    options: Sequence[RolloutOption] = (),
    **changes: Any,
) -> tuple[DiffusionBatch, np.ndarray | None]:
    """Samples two images of each prompt, guided, stochastic in all steps but the last."""
    spec = tiny.spec("sde", tiny.guided, **changes)
    engine = DiffusersEngine(model, network, dtype=spec.dtype, chunk_size=4, options=options)
    steps = spec.num_inference_steps - 1
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=prompts_for(tiny), slots=[0, 1]),
        samples_per_prompt=2,
        spec=spec,
        window=torch.arange(steps).expand(4, steps),
        seeds=[1, 2, 3, 4],
        decode=decode,
    )
    (chunk,) = engine.generate(request)
    return chunk.batch, chunk.samples


def deterministic(
    model: FlowModel, network: nn.Module, tiny: Tiny, spec: SamplerSpec, latents: torch.Tensor
) -> torch.Tensor:
    prompts = prompts_for(tiny)
    # As the stock pipeline is called: a prompt with images alone, others together.
    batches = [[0], [1]] if tiny.image_sizes else [[0, 1]]
    finals = []
    for rows in batches:
        encoded = encode_prompts(model, [prompts[row] for row in rows], spec)
        window = no_window(len(rows), latents.device)
        policy = FlowPolicy(model, network)
        finals.append(policy.rollout(latents[rows], *encoded, spec, window).final)
    return torch.cat(finals)


def call_stock(
    stock: Any, tiny: Tiny, spec: SamplerSpec, latents: torch.Tensor, output: str = "latent"
) -> Any:
    """Calls the stock pipeline; for prompts with images once for each, as it takes no others."""
    prompts = prompts_for(tiny)
    scales = {name: getattr(spec, name) for name in (*tiny.guided, "num_frames")}
    options = {name: value for name, value in scales.items() if value is not None}
    if not tiny.image_sizes:
        return _call_stock(stock, prompts, spec, latents, output, **options)
    # The size that Qwen-Image-Edit brings images to is a constant of its module.
    with patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", tiny.condition_pixels):
        results = [
            _call_stock(stock, [prompt], spec, latents[i : i + 1], output, **options)
            for i, prompt in enumerate(prompts)
        ]
    return np.concatenate(results) if output == "np" else torch.cat(results)


def _call_stock(
    stock: Any,
    prompts: list[Prompt],
    spec: SamplerSpec,
    latents: torch.Tensor,
    output: str,
    **options: Any,
) -> Any:
    if prompts[0].images:
        options["image"] = [Image.open(io.BytesIO(image)) for image in prompts[0].images]
    adapters = adapters_by_pipeline().values()
    adapter = next(a for a in adapters if a.pipeline_class == type(stock).__name__)
    if adapter.cfg_scale(spec) > 1:
        negatives = [prompt.negative_text for prompt in prompts]
        if "negative_prompt" in signature(stock.__call__).parameters:
            options["negative_prompt"] = negatives
        else:
            embeds, _ = stock.encode_prompt(negatives, max_sequence_length=16)
            options["negative_prompt_embeds"] = embeds
    return stock(
        prompt=[prompt.text for prompt in prompts],
        height=32,
        width=64,
        num_inference_steps=spec.num_inference_steps,
        max_sequence_length=16,
        latents=latents.clone(),
        output_type=output,
        return_dict=False,
        **options,
    )[0]


def drawn(model: FlowModel, spec: SamplerSpec) -> torch.Tensor:
    return normal(model.latent_shape(spec), [5, 6], "latents")


def difference(model: FlowModel, network: nn.Module, batch: DiffusionBatch) -> torch.Tensor:
    return FlowPolicy(model, network).log_probs(batch, 4) - batch.rollout_log_probs


def with_graph(model: FlowModel, network: nn.Module, batch: DiffusionBatch) -> torch.Tensor:
    """Returns log-probs step by step, as the update computes them."""
    policy = FlowPolicy(model, network)
    return torch.cat([policy.evaluate(batch.step(t)).log_probs for t in range(3)], 1)


def replayed(
    model: FlowModel, network: nn.Module, batch: DiffusionBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns log-probs of the update, and the gradients of their sum by name."""
    log_probs = with_graph(model, network, batch)
    network.zero_grad()
    log_probs.sum().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return log_probs.detach(), gradients


def test_an_adapter_fits_its_checkpoint(any_subject: Subject) -> None:
    """What it says of sizes and schedules it says without weights, too."""
    model = any_subject.load()
    tiny = any_subject.tiny
    spec = tiny.spec("sde", tiny.guided)
    assert type(model) is any_subject.adapter
    model.check(spec, "rollout.pipeline")
    with torch.device("meta"):
        empty = any_subject.adapter(tiny.build(), torch.device("meta"))
    empty.check(spec, "rollout.pipeline")
    assert all(parameter.is_meta for parameter in empty.transformer.parameters())
    assert empty.latent_shape(spec) == model.latent_shape(spec)
    # A first sigma slightly below 1 gives the first `sde` step a thousand times the noise.
    sigmas, timesteps = model.schedule(spec)
    assert sigmas.dtype == timesteps.dtype == torch.float32
    assert (len(sigmas), len(timesteps)) == (5, 4)
    assert (sigmas[0], sigmas[-1]) == (1, 0)
    assert (sigmas.diff() < 0).all()
    # A decoder keeps channels last on a CPU; what encodes keeps its layout.
    laid_out = {4: torch.channels_last, 5: torch.channels_last_3d}
    count = 0
    for name, weight in model.pipeline.vae.named_parameters():
        if weight.ndim in laid_out and name.startswith("decoder"):
            assert weight.is_contiguous(memory_format=laid_out[weight.ndim]), name
            count += not weight.is_contiguous()
        else:
            assert weight.is_contiguous(), name
    assert count > 0


@pytest.mark.kernels
def test_the_update_computes_what_the_rollout_recorded(any_subject: Subject) -> None:
    """In fp32 to the last bit, with a graph or without; only the LoRA learns."""
    model = any_subject.load()
    tiny = any_subject.tiny
    network = trained_lora(model)
    batch, samples = roll(model, network, tiny, decode=True)
    assert batch.negative is not None
    frames = () if tiny.num_frames is None else (tiny.num_frames,)
    assert samples is not None
    assert (samples.shape, samples.dtype) == ((4, *frames, 32, 64, 3), np.uint8)
    assert torch.isfinite(batch.rollout_log_probs).all()
    assert torch.equal(difference(model, network, batch), torch.zeros(4, 3))
    together = FlowPolicy(model, network, steps_per_forward=None).log_probs(batch, 4)
    torch.testing.assert_close(together, batch.rollout_log_probs, rtol=0, atol=1e-5)

    log_probs, gradients = replayed(model, network, batch)
    assert torch.equal(log_probs, batch.rollout_log_probs)
    reached = {name for name, gradient in gradients.items() if gradient.abs().max() > 0}
    assert reached <= set(lora_parameters(network))
    # What the last block does to the text is not used: some modules of it get nothing.
    assert len(reached) > 0.8 * len(lora_parameters(network))
    for name, component in model.pipeline.components.items():
        if isinstance(component, nn.Module) and name not in model.networks:
            assert all(parameter.grad is None for parameter in component.parameters())
    for transformer in transformers(network).values():
        transformer.enable_gradient_checkpointing()
    again, checkpointed = replayed(model, network, batch)
    assert torch.equal(again, log_probs)
    assert checkpointed.keys() == gradients.keys()
    assert all(torch.equal(checkpointed[name], x) for name, x in gradients.items())

    # An engine encodes each prompt apart; the joined batch replays like one sampled at once.
    chunks = []
    for i, prompt in enumerate(prompts_for(tiny)):
        conditioning, negative = encode_prompts(model, [prompt], batch.spec)
        rows = batch.rows(2 * i, 2 * i + 2)
        first = torch.zeros_like(rows.prompt_index)
        chunks.append(
            rows.replace(conditioning=conditioning, negative=negative, prompt_index=first)
        )
    joined = concat(chunks)
    assert joined.prompt_index.tolist() == [0, 0, 1, 1]
    assert difference(model, network, joined).abs().max() < 1e-5
    assert concat([batch.rows(0, 2), batch.rows(2, 4)]).conditioning is batch.conditioning


@pytest.mark.kernels
def test_bf16_on_both_sides_replays_bitwise(subject: Subject) -> None:
    """Layers that a model's class keeps in fp32 stay in fp32 in the rollout's copy."""
    model = subject.load("bf16")
    tiny = subject.tiny
    network = trained_lora(model)
    for transformer in transformers(network).values():
        assert input_dtype(transformer) == transformer.dtype == torch.bfloat16
    batch, _ = roll(model, network, tiny, dtype="bf16")
    log_probs = with_graph(model, network, batch)
    assert log_probs.requires_grad
    assert torch.equal(log_probs, batch.rollout_log_probs)


def test_a_vae_in_bf16_decodes_nearly_the_same(subject: Subject) -> None:
    """On a card alone, and where the stock pipeline has it so."""
    model = subject.load()
    config = subject.config(dtype="bf16")
    spec = subject.tiny.spec("sde", subject.tiny.unguided)
    latents = drawn(model, spec)
    whole = model.decode(latents, spec)
    in_bf16 = {"stock_in_bf16": model.vae_in_bf16}
    assert component_dtype(config, "vae", torch.device("cpu"), **in_bf16) == torch.float32
    on_card = component_dtype(config, "vae", torch.device("cuda"), **in_bf16)
    model.pipeline.vae = copy.deepcopy(model.pipeline.vae).to(on_card)
    apart = np.abs(model.decode(latents, spec).astype(int) - whole)
    assert (apart.max() > 0) == model.vae_in_bf16
    assert apart.mean() < 1


@pytest.mark.kernels
def test_noise_zero_gives_the_stock_pipelines_output(any_subject: Subject) -> None:
    model = any_subject.load()
    stock = any_subject.stock()
    tiny = any_subject.tiny
    spec = tiny.spec("sde", tiny.guided, noise_level=0.0)
    latents = drawn(model, spec)
    final = deterministic(model, model.network, tiny, spec, latents)
    as_stock = tiny.stock_latents(model, final)
    assert torch.equal(as_stock, call_stock(stock, tiny, spec, latents))
    pictures = (call_stock(stock, tiny, spec, latents, "np") * 255).round().astype(int)
    assert pictures.std() > 1
    apart = np.abs(model.decode(final, spec).astype(int) - pictures)
    # Equal latents too may round to the next level: kernels of a VAE depend on the processor.
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-3


# A published checkpoint -> the random one of its class.
PUBLISHED = {
    "stable-diffusion-3.5-medium": "StableDiffusion3Pipeline",
    "FLUX.1-dev": "FluxPipeline",
    "FLUX.2-klein-4B": "Flux2KleinPipeline",
    "Qwen-Image": "QwenImagePipeline",
    "Qwen-Image-Edit-2511": "QwenImageEditPlusPipeline",
    "Sana_600M_512px_diffusers": "SanaPipeline",
    "Wan2.1-T2V-1.3B-Diffusers": "WanPipeline",
    "Wan2.2-T2V-A14B-Diffusers": "WanPipeline+transformer_2",
    "Z-Image": "ZImagePipeline",
    "Z-Image-Turbo": "ZImagePipeline",
}
# By how much latents, up to 5, may differ where a scheduler computes a step in another order than
# Euler's.
APART = {
    "UniPCMultistepScheduler": 1e-5,
    "DPMSolverMultistepScheduler": 2e-3,  # it starts from the sigma 0.9997, where the adapter has 1
}


def published_scheduler(name: str) -> Any:
    """Makes a published scheduler at order 1, with the shift of its largest picture."""
    files = json.loads((config_folder() / "architectures" / f"{name}.json").read_text())
    config = files["scheduler/scheduler_config.json"]
    if "max_shift" in config:
        config["base_shift"] = config["max_shift"]  # the line between them is then flat
    if "solver_order" in config:
        config |= {"solver_order": 1, "disable_corrector": [*range(100)]}
    return getattr(diffusers, config["_class_name"]).from_config(config)


@pytest.mark.kernels
@pytest.mark.parametrize(("steps", "guidance"), [(10, "unguided"), slow(28, "guided")])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedules_give_the_stock_pipelines_output(
    saved: Callable[[str], Path], name: str, steps: int, guidance: str
) -> None:
    subject = make_subject(PUBLISHED[name], saved)
    model, stock, tiny = subject.load(), subject.stock(), subject.tiny
    for pipeline in (model.pipeline, stock):
        pipeline.register_modules(scheduler=published_scheduler(name))
    spec = tiny.spec("sde", vars(tiny)[guidance], noise_level=0.0, num_inference_steps=steps)
    latents = drawn(model, spec)
    final = deterministic(model, model.network, tiny, spec, latents)
    wanted = call_stock(stock, tiny, spec, latents)
    apart = APART.get(type(stock.scheduler).__name__, 0)
    torch.testing.assert_close(tiny.stock_latents(model, final), wanted, atol=apart, rtol=0)


@pytest.mark.kernels
def test_an_export_gives_the_same_pictures_in_the_stock_pipeline(
    subject: Subject, tmp_path: Path
) -> None:
    """Before it is trained, and switched off, a LoRA leaves the base as it is."""
    model = subject.load()
    stock = subject.stock()
    tiny = subject.tiny
    config = subject.config(lora_alpha=6)  # alpha / rank is no power of two
    spec = tiny.spec("sde", tiny.guided, noise_level=0.0)
    latents = drawn(model, spec)
    base = deterministic(model, model.network, tiny, spec, latents)
    network = add_lora(model, config, seed=0)
    assert torch.equal(deterministic(model, network, tiny, spec, latents), base)
    perturb(network, 0.05)
    final = deterministic(model, network, tiny, spec, latents)
    with reference_policy(network):
        assert torch.equal(deterministic(model, network, tiny, spec, latents), base)
    export_lora(lora_state(network), config, tmp_path)
    stock.load_lora_weights(tmp_path)
    for name in model.networks[1:]:
        stock.load_lora_weights(tmp_path / name, **{f"load_into_{name}": True})
    assert (final - base).abs().max() > 1e-3
    as_stock = tiny.stock_latents(model, final)
    assert torch.equal(as_stock, call_stock(stock, tiny, spec, latents))


TEXTS = ["a", "two red cats", '"AB7X"']


@pytest.mark.kernels
def test_prompts_of_different_length_do_not_touch_each_other(subject: Subject) -> None:
    """A prompt gives in a batch, encoded together or apart, what it gives alone."""
    model = subject.load()
    tiny = subject.tiny
    spec = tiny.spec("sde", tiny.guided)
    latents = normal(model.latent_shape(spec), [1, 2, 3], "latents")
    timesteps = torch.tensor([900.0, 500.0, 300.0])

    def encode(texts: list[str]) -> Conditioning:
        prompts = [Prompt(text=text, index=0, images=tiny.images(len(text))) for text in texts]
        return encode_unique(model, prompts, spec)

    def velocity(rows: slice, conditioning: Conditioning, negative: Conditioning) -> torch.Tensor:
        inputs = latents[rows], timesteps[rows], conditioning, negative
        return model.velocity(model.network, *inputs, spec)

    with torch.no_grad():
        alone = [
            velocity(slice(i, i + 1), encode([text]), encode([negative]))
            for i, (text, negative) in enumerate(zip(TEXTS, reversed(TEXTS), strict=True))
        ]
        together = velocity(slice(3), encode(TEXTS), encode(TEXTS[::-1]))
        joined = Conditioning.join([encode([text]) for text in TEXTS])
        assert len(joined) == 3
        from_parts = velocity(
            slice(3), joined, Conditioning.join([encode(TEXTS[:0:-1]), encode(TEXTS[:1])])
        )
    assert not torch.allclose(alone[0], alone[1])
    for velocities in (together, from_parts):
        torch.testing.assert_close(velocities, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp32", []), slow("bf16", [RoundedLora()]), slow("bf16", [MergedLora()])],
)
def test_bf16_rollout_has_a_mismatch_of_the_expected_scale(subject, dtype, options):
    model = subject.load(dtype)
    network = trained_lora(model)
    batch, _ = roll(model, network, subject.tiny, dtype="bf16", options=options)
    assert batch.all_latents.dtype == batch.rollout_log_probs.dtype == torch.float32
    assert 1e-7 < difference(model, network, batch).abs().mean() < BF16_BOUND

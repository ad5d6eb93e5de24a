"""What every adapter must do, on a random checkpoint of its pipeline's class (`tiny_models`).

A new adapter is found by its file. It takes part as soon as `tiny_models.TINY` has a checkpoint for
it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
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
from support.tiny_models import VARIANTS, Tiny

from flowgrpo_rc.batch import Conditioning, DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.config.names import config_folder
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.exports.lora import export_lora
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline, load_model
from flowgrpo_rc.models.layout import input_dtype
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.models.vae import keep_channels_last, vae_dtype
from flowgrpo_rc.policies.encode_prompts import encode_prompts, encode_unique
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.rollout.options.merged_lora import MergedLora, RoundedLora
from flowgrpo_rc.rollout.options.option import RolloutOption


def prompts_for(tiny: Tiny) -> list[Prompt]:
    return [
        Prompt(text=text, index=i, target=text[1:-1], negative_text=blur, images=tiny.images(i))
        for i, (text, blur) in enumerate([('"AB7X"', "a blur"), ('"HI"', "")])
    ]


GUIDANCE = ("unguided", "guided")
# Both kinds of steps, and both guidances.
SAMPLERS = [("sde", "guided"), slow("cps", "unguided")]
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


def roll(
    model: FlowModel,
    network: torch.nn.Module,
    tiny: Tiny,
    spec: SamplerSpec,
    options: Sequence[RolloutOption] = (),
) -> tuple[DiffusionBatch, np.ndarray]:
    """Samples two images of each prompt, stochastic in all steps but the last."""
    engine = DiffusersEngine(model, network, dtype=spec.dtype, chunk_size=4, options=options)
    steps = spec.num_inference_steps - 1
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=prompts_for(tiny), slots=[0, 1]),
        samples_per_prompt=2,
        spec=spec,
        window=torch.arange(steps).expand(4, steps),
        seeds=[1, 2, 3, 4],
    )
    (chunk,) = engine.generate(request)
    return chunk.batch, chunk.samples


def deterministic(
    model: FlowModel, network: Any, tiny: Tiny, spec: SamplerSpec, latents: torch.Tensor
) -> torch.Tensor:
    prompts = prompts_for(tiny)
    # As the stock pipeline is called: a prompt with images alone, others together.
    batches = [[0], [1]] if tiny.image_sizes else [[0, 1]]
    parts = []
    for rows in batches:
        conditioning, negative = encode_prompts(model, [prompts[row] for row in rows], spec)
        nothing = torch.empty((len(rows), 0), dtype=torch.int64)
        own = latents[rows]
        policy = FlowPolicy(model, network)
        parts.append(
            policy.rollout(own, conditioning, negative, spec, nothing, lambda _, own=own: own).final
        )
    return torch.cat(parts)


def call_stock(
    stock: Any,
    tiny: Tiny,
    guidance: Mapping[str, float],
    latents: torch.Tensor,
    output: str,
    prompts: list[Prompt] | None = None,
    steps: int = 4,
) -> Any:
    """Calls the stock pipeline; for prompts with images once for each, as it takes no others."""
    if prompts is None:
        prompts = prompts_for(tiny)
    if tiny.image_sizes and len(prompts) > 1:
        # The size that Qwen-Image-Edit brings images to is a constant of its module.
        with patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", tiny.condition_pixels):
            parts = [
                call_stock(stock, tiny, guidance, latents[i : i + 1], output, [prompt], steps)
                for i, prompt in enumerate(prompts)
            ]
        return np.concatenate(parts) if output == "np" else torch.cat(parts)
    given: dict[str, Any] = {} if tiny.num_frames is None else {"num_frames": tiny.num_frames}
    if prompts[0].images:
        given["image"] = [Image.open(io.BytesIO(image)) for image in prompts[0].images]
    adapters = adapters_by_pipeline().values()
    (key,) = {a.cfg_key for a in adapters if a.pipeline_class == type(stock).__name__}
    if max(guidance.get("true_cfg_scale", 0), guidance.get(key, 0)) > 1:
        negatives = [prompt.negative_text for prompt in prompts]
        if "negative_prompt" in signature(stock.__call__).parameters:
            given["negative_prompt"] = negatives
        else:
            embeds, _ = stock.encode_prompt(negatives, max_sequence_length=16)
            given["negative_prompt_embeds"] = embeds
    return stock(
        prompt=[prompt.text for prompt in prompts],
        height=32,
        width=64,
        num_inference_steps=steps,
        max_sequence_length=16,
        latents=latents.clone(),
        output_type=output,
        return_dict=False,
        **guidance,
        **given,
    )[0]


def drawn(model: FlowModel, spec: SamplerSpec) -> torch.Tensor:
    return normal(model.latent_shape(spec), [5, 6], "latents")


def difference(model: FlowModel, network: Any, batch: DiffusionBatch) -> torch.Tensor:
    return FlowPolicy(model, network).log_probs(batch, 4) - batch.rollout_log_probs


def test_the_checkpoint_is_wrapped_by_its_adapter(any_subject: Subject) -> None:
    model = any_subject.load()
    assert type(model) is any_subject.adapter
    for key in ("rollout.pipeline", "rollout.val_kwargs"):
        model.check(any_subject.tiny.spec("sde", any_subject.tiny.guided), key)


def test_the_precision_of_the_inputs_is_that_of_diffusers(any_subject: Subject) -> None:
    model = any_subject.load("bf16")
    network = add_lora(model, any_subject.config(dtype="bf16"), seed=0)
    for transformer in transformers(network).values():
        assert input_dtype(transformer) == transformer.dtype == torch.bfloat16


def test_the_schedule_goes_from_exactly_one_to_zero(any_subject: Subject) -> None:
    """With a first sigma slightly below 1 the first `sde` step would have a thousand times the
    noise.
    """
    sigmas, timesteps = any_subject.load().schedule(
        any_subject.tiny.spec("sde", any_subject.tiny.unguided)
    )
    assert sigmas.dtype == timesteps.dtype == torch.float32
    assert (len(sigmas), len(timesteps)) == (5, 4)
    assert (sigmas[0], sigmas[-1]) == (1, 0)
    assert (sigmas.diff() < 0).all()


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "guidance"), SAMPLERS)
def test_fp32_replay_is_bitwise_exact(any_subject: Subject, kind: str, guidance: str) -> None:
    model = any_subject.load()
    tiny = any_subject.tiny
    network = trained_lora(model)
    batch, samples = roll(model, network, tiny, tiny.spec(kind, vars(tiny)[guidance]))
    assert (batch.negative is not None) == (guidance == "guided")
    frames = () if tiny.num_frames is None else (tiny.num_frames,)
    assert (samples.shape, samples.dtype) == ((4, *frames, 32, 64, 3), np.uint8)
    assert torch.isfinite(batch.rollout_log_probs).all()
    assert torch.equal(difference(model, network, batch), torch.zeros(4, 3))
    policy = FlowPolicy(model, network)
    with_gradient = torch.cat([policy.evaluate(batch.step(t)).log_probs for t in range(3)], 1)
    assert with_gradient.requires_grad
    assert torch.equal(with_gradient.detach(), batch.rollout_log_probs)
    together = FlowPolicy(model, network, steps_per_forward=None).log_probs(batch, 4)
    torch.testing.assert_close(together, batch.rollout_log_probs, rtol=0, atol=1e-5)


@pytest.mark.kernels
def test_bf16_replay_on_a_cpu_is_bitwise_exact(any_subject: Subject) -> None:
    model = any_subject.load("bf16")
    network = trained_lora(model)
    spec = any_subject.tiny.spec("sde", any_subject.tiny.unguided, dtype="bf16")
    batch, _ = roll(model, network, any_subject.tiny, spec)
    assert torch.equal(difference(model, network, batch), torch.zeros(4, 3))
    policy = FlowPolicy(model, network)
    with_gradient = torch.cat([policy.evaluate(batch.step(t)).log_probs for t in range(3)], 1)
    assert torch.equal(with_gradient.detach(), batch.rollout_log_probs)


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "guidance"), SAMPLERS)
def test_noise_zero_gives_the_stock_pipelines_output(any_subject, kind, guidance):
    model = any_subject.load()
    stock = any_subject.stock()
    tiny = any_subject.tiny
    spec = tiny.spec(kind, vars(tiny)[guidance], noise_level=0.0)
    latents = drawn(model, spec)
    found = deterministic(model, model.network, tiny, spec, latents)
    wanted = call_stock(stock, tiny, vars(tiny)[guidance], latents, "latent")
    exact = kind == "sde" and tiny.steps_are_eulers
    as_stock = tiny.stock_latents(model, found)
    torch.testing.assert_close(as_stock, wanted, atol=0 if exact else 1e-5, rtol=0)
    pictures = (
        (call_stock(stock, tiny, vars(tiny)[guidance], latents, "np") * 255).round().astype(int)
    )
    assert pictures.std() > 1
    apart = np.abs(model.decode(found, spec).astype(int) - pictures)
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
    found = deterministic(model, model.network, tiny, spec, latents)
    wanted = call_stock(stock, tiny, vars(tiny)[guidance], latents, "latent", steps=steps)
    apart = APART.get(type(stock.scheduler).__name__, 0)
    torch.testing.assert_close(tiny.stock_latents(model, found), wanted, atol=apart, rtol=0)


def test_lora_at_initialisation_and_switched_off_is_the_base(subject: Subject) -> None:
    model = subject.load()
    tiny = subject.tiny
    spec = tiny.spec("sde", tiny.guided, noise_level=0.0)
    latents = drawn(model, spec)
    base = deterministic(model, model.network, tiny, spec, latents)
    network = add_lora(model, subject.config(), seed=0)
    assert torch.equal(deterministic(model, network, tiny, spec, latents), base)
    for name, parameter in lora_parameters(network).items():
        if "lora_B" in name:
            parameter.data.fill_(0.01)
    trained = deterministic(model, network, tiny, spec, latents)
    assert not torch.allclose(trained, base)
    with reference_policy(network):
        assert torch.equal(deterministic(model, network, tiny, spec, latents), base)
    assert torch.equal(deterministic(model, network, tiny, spec, latents), trained)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "alpha",
    [pytest.param(8, id="power_of_two", marks=pytest.mark.slow), pytest.param(6, id="other_scale")],
)
def test_an_export_gives_the_same_pictures_in_the_stock_pipeline(subject, tmp_path, alpha):
    model = subject.load()
    stock = subject.stock()
    keep_channels_last(stock.vae)
    tiny = subject.tiny
    config = subject.config(lora_alpha=alpha)
    network = add_lora(model, config, seed=0)
    source = torch.Generator().manual_seed(1)
    for name, parameter in lora_parameters(network).items():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=source))
    spec = tiny.spec("sde", tiny.guided, noise_level=0.0)
    latents = drawn(model, spec)
    before = call_stock(stock, tiny, tiny.guided, latents, "latent")
    export_lora(
        {name: p.detach() for name, p in lora_parameters(network).items()}, config, tmp_path
    )
    stock.load_lora_weights(tmp_path)
    for name in model.networks[1:]:
        stock.load_lora_weights(tmp_path / name, **{f"load_into_{name}": True})
    found = deterministic(model, network, tiny, spec, latents)
    wanted = call_stock(stock, tiny, tiny.guided, latents, "latent")
    as_stock = tiny.stock_latents(model, found)
    assert (as_stock - before).abs().max() > 1e-3
    assert torch.equal(as_stock, wanted)
    pictures = (call_stock(stock, tiny, tiny.guided, latents, "np") * 255).round().astype(np.uint8)
    assert np.array_equal(model.decode(found, spec), pictures)


def test_a_vae_in_bf16_decodes_nearly_the_same(subject: Subject) -> None:
    """On a card alone, and where the stock pipeline has it so."""
    model = load_model(subject.config(dtype="bf16"), torch.device("cpu"))
    spec = subject.tiny.spec("sde", subject.tiny.unguided)
    latents = drawn(model, spec)
    assert model.pipeline.vae.dtype == torch.float32
    whole = model.decode(latents, spec)
    on_card = vae_dtype("bf16", torch.device("cuda"), stock_in_bf16=model.vae_in_bf16)
    model.pipeline.vae.to(on_card)
    apart = np.abs(model.decode(latents, spec).astype(int) - whole)
    assert (apart.max() > 0) == model.vae_in_bf16
    assert apart.mean() < 1


def test_a_decoder_keeps_channels_last_on_a_cpu(any_subject: Subject) -> None:
    """Its pictures are those of the stock pipeline, above; what encodes keeps its layout."""
    laid_out = {4: torch.channels_last, 5: torch.channels_last_3d}
    count = 0
    for name, weight in any_subject.load().pipeline.vae.named_parameters():
        if weight.ndim in laid_out and name.startswith("decoder"):
            assert weight.is_contiguous(memory_format=laid_out[weight.ndim]), name
            count += not weight.is_contiguous()
        else:
            assert weight.is_contiguous(), name
    assert count > 0


def gradients(
    model: FlowModel, network: Any, batch: DiffusionBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = FlowPolicy(model, network).evaluate(batch).log_probs
    network.zero_grad()
    value.sum().backward()
    return value.detach(), {
        name: p.grad for name, p in network.named_parameters() if p.grad is not None
    }


def test_gradients_reach_the_lora_alone_and_checkpointing_changes_nothing(subject: Subject) -> None:
    model = subject.load()
    tiny = subject.tiny
    network = trained_lora(model)
    batch, _ = roll(model, network, tiny, tiny.spec("sde", tiny.guided))
    value, plain = gradients(model, network, batch)
    reached = {name for name, gradient in plain.items() if gradient.abs().max() > 0}
    assert reached <= set(lora_parameters(network))
    # What the last block does to the text is not used: some modules of it get nothing.
    assert len(reached) > 0.8 * len(lora_parameters(network))
    for name, component in model.pipeline.components.items():
        if isinstance(component, torch.nn.Module) and name not in model.networks:
            assert all(parameter.grad is None for parameter in component.parameters())
    for transformer in transformers(network).values():
        transformer.enable_gradient_checkpointing()
    again, checkpointed = gradients(model, network, batch)
    assert torch.equal(again, value)
    assert checkpointed.keys() == plain.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


TEXTS = ["a", "two red cats", '"AB7X"']


@pytest.mark.kernels
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_prompts_of_different_length_do_not_touch_each_other(subject, guidance):
    """A prompt gives in a batch, encoded together or apart, what it gives alone."""
    model = subject.load()
    tiny = subject.tiny
    spec = tiny.spec("sde", vars(tiny)[guidance])
    latents = normal(model.latent_shape(spec), [1, 2, 3], "latents")
    timesteps = torch.tensor([900.0, 500.0, 300.0])

    def encode(texts: list[str]) -> Conditioning:
        prompts = [Prompt(text=text, index=0, images=tiny.images(len(text))) for text in texts]
        return encode_unique(model, prompts, spec)

    def velocity(rows: slice, conditioning: Conditioning, negative: Conditioning) -> torch.Tensor:
        pair = (conditioning, negative if guidance == "guided" else None)
        return model.velocity(model.network, latents[rows], timesteps[rows], *pair, spec)

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
    for found in (together, from_parts):
        torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_chunks_with_a_conditioning_of_their_own_can_be_joined(subject: Subject) -> None:
    """An engine encodes each prompt apart.

    The joined batch replays like one that was sampled at once.
    """
    model = subject.load()
    tiny = subject.tiny
    network = trained_lora(model)
    spec = tiny.spec("sde", tiny.guided)
    whole, _ = roll(model, network, tiny, spec)
    chunks = []
    for i, prompt in enumerate(prompts_for(tiny)):
        conditioning, negative = encode_prompts(model, [prompt], spec)
        rows = whole.rows(2 * i, 2 * i + 2)
        nothing = torch.zeros_like(rows.prompt_index)
        chunks.append(
            rows.replace(conditioning=conditioning, negative=negative, prompt_index=nothing)
        )
    joined = concat(chunks)
    assert joined.prompt_index.tolist() == [0, 0, 1, 1]
    assert difference(model, network, joined).abs().max() < 1e-5
    assert concat([whole.rows(0, 2), whole.rows(2, 4)]).conditioning is whole.conditioning


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp32", []), slow("bf16", [RoundedLora()]), slow("bf16", [MergedLora()])],
)
def test_bf16_rollout_has_a_mismatch_of_the_expected_scale(subject, dtype, options):
    model = subject.load(dtype)
    tiny = subject.tiny
    network = trained_lora(model)
    for guidance in GUIDANCE:
        spec = tiny.spec("sde", vars(tiny)[guidance], dtype="bf16")
        batch, _ = roll(model, network, tiny, spec, options)
        assert batch.all_latents.dtype == batch.rollout_log_probs.dtype == torch.float32
        assert 1e-7 < difference(model, network, batch).abs().mean() < BF16_BOUND


def test_bf16_on_both_sides_replays_bitwise(subject: Subject) -> None:
    """Layers that a model's class keeps in fp32 stay in fp32 in the rollout's copy."""
    model = subject.load(dtype="bf16")
    tiny = subject.tiny
    network = trained_lora(model)
    batch, _ = roll(model, network, tiny, tiny.spec("sde", tiny.guided, dtype="bf16"))
    assert torch.equal(difference(model, network, batch), torch.zeros(4, 3))


def test_latents_have_the_same_shape_without_weights(subject: Subject) -> None:
    with torch.device("meta"):
        pipeline = subject.tiny.build()
    empty = subject.adapter(pipeline, torch.device("meta"))
    spec = subject.tiny.spec("sde", subject.tiny.guided)
    empty.check(spec, "rollout.pipeline")
    assert all(parameter.is_meta for parameter in empty.transformer.parameters())
    assert empty.latent_shape(spec) == subject.load().latent_shape(spec)

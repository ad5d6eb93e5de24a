"""The floating-point operations of a planned step, counted on tensors without numbers."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from statistics import mean
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.block_cache import middle_blocks
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.planning.activations import blank_inputs, measured
from flowgrpo_rc.planning.weights import Job
from flowgrpo_rc.planning.work import HELD_OUT, guidance, passes
from flowgrpo_rc.spec.check_inputs import prompts_of

_STEPS = 20  # whose prompts tell how long prompts are


def operations(job: Job) -> dict[str, int]:
    """Counts the matrix products and convolutions of each kind of `passes`, and of HELD_OUT."""
    config, model, rollout = job.config, job.model, job.config.rollout
    spec, held_out = rollout.spec(), rollout.held_out_spec()
    tokens = _tokens(job)

    def forward(network: Any, asked: SamplerSpec = spec, *, lora: bool = True) -> int:
        inputs = _inputs(job, asked, tokens)
        with torch.no_grad(), nullcontext() if lora else reference_policy(network):
            return _counted(lambda: model.velocity(network, *inputs, asked))

    def update(network: Any) -> int:
        if config.model.gradient_checkpointing:
            network.enable_gradient_checkpointing()
        network.train()  # checkpointing asks for it; there is no dropout
        inputs = _inputs(job, spec, tokens)
        return _counted(lambda: model.velocity(network, *inputs, spec).square().mean().backward())

    def decoding(asked: SamplerSpec) -> int:
        latents = torch.empty(1, *model.latent_shape(asked), device="meta")
        with torch.no_grad():
            return _counted(lambda: model._decode(latents, asked))

    network, base = model.transformer, partial(forward, lora=False)
    cached = base if rollout.merge_lora is True else forward
    ways: dict[str, Any] = {"forward": forward, "base": base, "cached": cached, "update": update}
    found = {"VAE": decoding(spec), "encoders": _encoding(job, tokens[0])}
    for kind in {kind for *_, kind in passes(job)} - {*found}:
        left = copy.deepcopy(network)
        for blocks, middle in middle_blocks(left) if kind == "cached" else ():
            del blocks[middle.start : middle.stop]
        found[kind] = measured(left, ways[kind]) // guidance(job)[0]
    shown = measured(network, partial(forward, asked=held_out))
    found[HELD_OUT] = held_out.num_inference_steps * shown + decoding(held_out)
    return found


def _tokens(job: Job) -> tuple[int, int]:
    """Returns how many tokens of text the transformer gets with a prompt and with a negative one.

    Where prompts keep their length and can be read here, those of the longest in a step, in the
    mean of some steps; else the most.
    """
    model, spec, tokenizer = job.model, job.config.rollout.spec(), job.tokenizers.get("tokenizer")
    most = spec.max_sequence_length
    if tokenizer is None or not model.keeps_length:
        return most, most
    try:
        sampler = prompts_of(job.spec).sampler
    except ValueError:  # a plan is made for another machine, too, which may have other files
        return most, most
    kept = model.most_tokens(tokenizer, spec) or most

    def length(text: str) -> int:
        ids = tokenizer(model.templated(tokenizer, text)).input_ids
        return min(len(ids), kept) - (kept - most)  # without what the encoder is told

    drawn = [sampler.step(step) for step in range(_STEPS)]
    texts = mean(max(length(prompt.text) for prompt in prompts) for prompts in drawn)
    others = mean(max(length(prompt.negative_text) for prompt in prompts) for prompts in drawn)
    return round(texts), round(others)


def _inputs(job: Job, spec: SamplerSpec, tokens: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Returns what the transformer gets for one sample, whose texts have so many tokens."""
    own, other = (replace(spec, max_sequence_length=length) for length in tokens)
    latents, times, text, negative = blank_inputs(job.model, 1, own)
    if negative is not None:
        negative = job.model.blank_conditioning(1, other)
    return latents, times, text, negative


def _encoding(job: Job, tokens: int) -> int:
    """Counts the operations of text encoders on a prompt; those on its images are left out."""
    model, spec, found = job.model, job.config.rollout.spec(), 0
    for name in filter(lambda name: name.startswith("text_encoder"), job.networks):
        encoder: Any = job.networks[name]
        is_clip = type(encoder).__name__.startswith("CLIP")
        length = model.pipeline.tokenizer_max_length if is_clip else spec.max_sequence_length
        tokenizer = job.tokenizers.get(name.replace("text_encoder", "tokenizer"))
        if tokenizer is not None:
            length = model.most_tokens(tokenizer, spec) or length
        if model.pads_to_longest:
            length -= spec.max_sequence_length - tokens
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        names = {"input_ids", "position_ids"} & {*signature(encoder.forward).parameters}
        with torch.no_grad():
            found += _counted(partial(encoder, **dict.fromkeys(names, ids)))
    return found


def _counted(run: Callable[[], Any]) -> int:
    # Kernels of attention that are fused hide their products from the counter.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())

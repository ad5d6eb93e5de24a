"""The floating-point operations of a planned step, counted on tensors without numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from statistics import mean

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.block_cache import middle_blocks
from flowgrpo_rc.models.lora import reference_policy
from flowgrpo_rc.planning.activations import blank_inputs, measured, to_train
from flowgrpo_rc.planning.weights import Job, networks_of
from flowgrpo_rc.planning.work import HELD_OUT, guidance, passes
from flowgrpo_rc.spec.check_inputs import prompts_of

_STEPS = 20  # whose prompts tell how long prompts are


def operations(job: Job) -> dict[str, int]:
    """Counts the matrix products and convolutions of each kind of `passes`, and of HELD_OUT."""
    config, model, rollout = job.config, job.model, job.config.rollout
    lengths = _tokens(job)

    def evaluate(kind: str, spec: SamplerSpec, network: nn.Module) -> int:
        specs = (replace(spec, max_sequence_length=length) for length in lengths)
        inputs = blank_inputs(model, 1, *specs)
        without_lora = kind == "base" or (kind == "cached" and rollout.merge_lora is True)
        if kind == "update":
            to_train(network, config)
            with _counting() as counter:
                model.velocity(network, *inputs, spec).square().mean().backward()
        else:
            policy = reference_policy(network) if without_lora else nullcontext()
            with policy, torch.no_grad(), _counting() as counter:
                model.velocity(network, *inputs, spec)
        return counter.get_total_flops()

    training, held_out = rollout.spec(), rollout.held_out_spec()
    by_kind = {"VAE": _decoding(job, training), "encoders": _encoding(job, lengths[0])}
    for kind in {kind for *_, kind in passes(job)} - by_kind.keys():
        network = model.transformer
        if kind == "cached":
            network = copy.deepcopy(network)
            for blocks, middle in middle_blocks(network):
                del blocks[middle.start : middle.stop]
        whole = measured(network, partial(evaluate, kind, training))
        by_kind[kind] = whole // guidance(job)[0]
    step = measured(model.transformer, partial(evaluate, "forward", held_out))
    by_kind[HELD_OUT] = held_out.num_inference_steps * step + _decoding(job, held_out)
    return by_kind


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    """Counts operations; kernels of attention that are fused would hide their products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter


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
    most_templated = model.most_tokens(tokenizer, spec) or most

    def length(text: str) -> int:
        ids = tokenizer(model.templated(tokenizer, text)).input_ids
        # Without what the encoder is told.
        return min(len(ids), most_templated) - (most_templated - most)

    steps = [sampler.step(step) for step in range(_STEPS)]
    texts = mean(max(length(prompt.text) for prompt in prompts) for prompts in steps)
    negatives = mean(max(length(prompt.negative_text) for prompt in prompts) for prompts in steps)
    return round(texts), round(negatives)


def _decoding(job: Job, spec: SamplerSpec) -> int:
    latents = torch.empty(1, *job.model.latent_shape(spec), device="meta")
    with torch.no_grad(), _counting() as counter:
        job.model._decode(latents, spec)
    return counter.get_total_flops()


def _encoding(job: Job, tokens: int) -> int:
    """Counts the operations of text encoders on a prompt; those on its images are left out."""
    model, spec = job.model, job.config.rollout.spec()
    with torch.no_grad(), _counting() as counter:
        for name, encoder in networks_of(model).items():
            if not name.startswith("text_encoder"):
                continue
            is_clip = type(encoder).__name__.startswith("CLIP")
            length = model.pipeline.tokenizer_max_length if is_clip else spec.max_sequence_length
            tokenizer = job.tokenizers.get(name.replace("text_encoder", "tokenizer"))
            if tokenizer is not None:
                length = model.most_tokens(tokenizer, spec) or length
            if model.pads_to_longest:
                length -= spec.max_sequence_length - tokens
            ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
            names = {"input_ids", "position_ids"} & signature(encoder.forward).parameters.keys()
            encoder(**dict.fromkeys(names, ids))
    return counter.get_total_flops()

"""Rollouts that skip the middle blocks, on each family, beside a plain version of the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.subjects import Subject, make_subject
from torch import nn
from torch._dynamo.testing import CompileCounter

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline
from flowgrpo_rc.models.block_cache import LISTS, BlockCache, saved_share
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.policies import flow
from flowgrpo_rc.policies.flow import FlowPolicy, no_window
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk
from flowgrpo_rc.rollout.options.cached_blocks import CachedBlocks
from flowgrpo_rc.rollout.options.compiled import Compiled
from flowgrpo_rc.rollout.options.merged_lora import MergedLora

CACHED = CachedBlocks(every=2)  # its steps are those of a request


@pytest.fixture(params=sorted(adapters_by_pipeline()))
def subject(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Subject:
    return make_subject(request.param, saved)


def deepened(subject: Subject) -> FlowModel:
    """Loads a model, gives it three more blocks in each list, and a LoRA with an effect."""
    model = subject.load()
    torch.manual_seed(0)
    for part in transformers(model.network).values():
        for blocks in block_lists(part):
            for _ in range(3):
                blocks.insert(0, moved(blocks[0]))
    add_lora(model, subject.config(), 0)
    with torch.no_grad():
        for parameter in lora_parameters(model.network).values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def moved(block: nn.Module) -> nn.Module:
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return other


def block_lists(transformer: Any) -> list[nn.ModuleList]:
    return [getattr(transformer, name) for name in LISTS if hasattr(transformer, name)]


def request_for(subject: Subject, guidance: str, **changes: Any) -> ImageRequest:
    spec = subject.tiny.spec("sde", getattr(subject.tiny, guidance), **changes)
    prompts = [
        Prompt(text=text, index=i, negative_text="a blur", images=subject.tiny.images(i))
        for i, text in enumerate(['"AB7X"', '"HI"'])
    ]
    return ImageRequest(
        prompts=PromptBatch(step=1, prompts=prompts, slots=[0, 1]),
        samples_per_prompt=2,
        spec=spec,
        window=torch.tensor([[1, 2]]).expand(4, 2),
        seeds=[1, 2, 3, 4],
        decode=False,
    )


def plainly_cached(
    model: FlowModel, request: ImageRequest, monkeypatch: pytest.MonkeyPatch
) -> RolloutChunk:
    """Samples as the cache should, with a residual of each block and call; one row a sample."""
    step, branch = -1, {}
    kept: dict[tuple[nn.Module, int], list[torch.Tensor]] = {}
    velocity = model.velocity

    def counting(*args: Any) -> torch.Tensor:
        nonlocal step
        step += 1
        branch.clear()
        return velocity(*args)

    def residual(block: nn.Module, given: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        branch[block] = branch.get(block, 0) + 1
        key = block, branch[block]
        if step not in request.spec.cached_steps or key not in kept:
            made = run()
            states = [made] if torch.is_tensor(made) else [made[1], made[0]]
            kept[key] = [new - old for new, old in zip(states, given, strict=False)]
        states = [old + part for old, part in zip(given, kept[key], strict=False)]
        return states[0] if len(states) == 1 else (states[1], states[0])

    engine = DiffusersEngine(model, model.network, dtype="fp32", chunk_size=4)
    for part in transformers(engine.transformer).values():
        blocks = [block for blocks in block_lists(part) for block in blocks]
        for block in blocks[1:-1]:
            own = block.forward

            def forward(*args: Any, _block: Any = block, _own: Any = own, **kwargs: Any) -> Any:
                image = args[0] if args else kwargs["hidden_states"]
                text = kwargs.get("encoder_hidden_states")
                given = [image] if text is None else [image, text]
                return residual(_block, given, lambda: _own(*args, **kwargs))

            monkeypatch.setattr(block, "forward", forward)
    monkeypatch.setattr(model, "velocity", counting)
    (chunk,) = engine.generate(request)
    return chunk


def test_a_cached_rollout_is_that_of_a_plain_version(subject, monkeypatch):
    model = deepened(subject)
    request = request_for(subject, "guided", cached_steps=(1, 3))
    engine = DiffusersEngine(model, model.network, dtype="fp32", chunk_size=4, options=[CACHED])
    evaluated = 0

    def count(block: nn.Module, inputs: object, made: object) -> None:
        nonlocal evaluated
        rows = made if torch.is_tensor(made) else made[-1]
        evaluated += len(rows)

    hooks = [
        getattr(block, "block", block).register_forward_hook(count)
        for part in transformers(engine.transformer).values()
        for blocks in block_lists(part)
        for block in blocks
    ]
    (cached,) = engine.generate(request)
    saved, evaluations = cached.blocks
    assert evaluated == evaluations - saved
    if len(model.networks) == 1:
        assert saved / evaluations == saved_share(model.network, 2, 4)
    for hook in hooks:
        hook.remove()
    cache = engine._replica.cache
    assert cache is not None
    states = [value for stretch in cache._stretches for value in vars(stretch).values()]
    assert not any(value for value in states if isinstance(value, list | dict))
    assert cached.batch.spec == request.spec
    exact = request_for(subject, "guided")
    (full,) = DiffusersEngine(model, model.network, dtype="fp32", chunk_size=4).generate(exact)
    assert (full.latents - cached.latents).abs().max() > 1e-3
    (uncached,) = engine.generate(exact)
    assert torch.equal(uncached.latents, full.latents)
    assert uncached.blocks[0] == full.blocks[0] == 0
    plain = plainly_cached(model, request, monkeypatch)
    torch.testing.assert_close(cached.latents, plain.latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        cached.batch.rollout_log_probs, plain.batch.rollout_log_probs, rtol=0, atol=1e-5
    )


def test_samples_that_share_a_prefix_take_its_residual_along(saved, monkeypatch):
    """Both samples of a prompt are one row up to the window, whose first step is not cached."""
    subject = make_subject("StableDiffusion3Pipeline", saved)
    model = deepened(subject)
    request = request_for(subject, "guided", shared_prefix=True, cached_steps=(2, 3))
    engine = DiffusersEngine(model, model.network, dtype="fp32", chunk_size=4, options=[CACHED])
    (found,) = engine.generate(request)
    rows = 2 + 2 + 4 + 4  # two prompts, and from the second step of the window on four samples
    assert found.blocks == (3 * 2 * 2 * 4, 5 * 2 * rows)
    every = torch.arange(4)
    monkeypatch.setattr(flow, "distinct_rows", lambda *_: (every, every))
    plain = plainly_cached(model, request, monkeypatch)
    torch.testing.assert_close(found.latents, plain.latents, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_skipped_is_refused(saved) -> None:
    model = make_subject("StableDiffusion3Pipeline", saved).load()  # of two blocks
    with pytest.raises(ValueError, match=r"rollout\.cache\.every has nothing to reuse"):
        BlockCache(model.transformer)
    with pytest.raises(ValueError, match="a Linear keeps its blocks in none of"):
        BlockCache(nn.Linear(2, 2))
    model.transformer.transformer_blocks.insert(0, moved(model.transformer.transformer_blocks[0]))
    model.transformer.transformer_blocks.insert(0, moved(model.transformer.transformer_blocks[0]))
    cache = BlockCache(model.transformer)
    cache.start(())
    cache.next_step()
    blocks = model.transformer.transformer_blocks
    blocks[1].register_forward_hook(lambda *args: tuple(part + 1 for part in args[-1]))
    spec = make_subject("StableDiffusion3Pipeline", saved).tiny.spec("sde", {"guidance_scale": 1.0})
    conditioning = model.blank_conditioning(1, spec)
    with pytest.raises(ValueError, match="changes the states between two of its blocks"):
        FlowPolicy(model, model.network).rollout(
            torch.zeros(1, *model.latent_shape(spec)),
            conditioning,
            None,
            spec,
            no_window(1, torch.device("cpu")),
        )


@pytest.mark.slow
def test_compiled_blocks_serve_every_number_of_rows_and_every_lora(saved):
    """Shared states, the last chunk, cached steps and a new LoRA need no further code."""
    counter = CompileCounter()
    subject = make_subject("FluxPipeline", saved)  # with two lists of blocks
    model = deepened(subject)
    cached = {"cached_steps": (1, 3), "shared_prefix": True}
    given = request_for(subject, "guided", **cached)
    requests = [
        dataclasses.replace(
            given,
            samples_per_prompt=samples,
            window=given.window[:1].expand(2 * samples, 2),
            seeds=[*range(2 * samples)],
        )
        for samples in (3, 4)
    ]
    lora = {name: p + 0.01 for name, p in lora_parameters(model.network).items()}
    found = []
    for compiled in ([], [Compiled(counter)]):
        engine = DiffusersEngine(
            model,
            model.network,
            dtype="fp32",
            chunk_size=5,
            options=[MergedLora(), *compiled, CACHED],
        )
        first = list(engine.generate(requests[0]))
        graphs = counter.frame_count
        engine.sync_weights(lora, 1)
        found.append([*first, *engine.generate(requests[1])])
    assert counter.frame_count == graphs >= 1
    assert [len(chunk.prompts) for chunk in found[1]] == [5, 1, 5, 3]
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain.latents, compiled.latents, rtol=1e-5, atol=1e-5)

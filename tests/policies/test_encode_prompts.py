"""Prompts are encoded once in a run, and what is kept gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from support.image_rollouts import make_spec
from support.subjects import make_subject

from flowgrpo_rc.batch import Conditioning, Prompt
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline
from flowgrpo_rc.models.editing import EditingModel
from flowgrpo_rc.models.prompt_cache import PromptCache
from flowgrpo_rc.policies.encode_prompts import encode_prompts, encode_unique
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.config import EvaluationConfig, PipelineConfig, RolloutConfig
from flowgrpo_rc.training.tasks.image import ImageTask

PROMPTS = [
    Prompt(text="A", index=0),
    Prompt(text="B", index=1, negative_text="dim"),
    Prompt(text="A", index=2),
]


@pytest.fixture
def calls(model: FlowModel) -> Iterator[list[int]]:
    """Notes how many texts a text encoder is given each time."""
    found: list[int] = []
    hook = model.pipeline.text_encoder.register_forward_pre_hook(
        lambda _, inputs: found.append(len(inputs[0]))
    )
    yield found
    hook.remove()


def assert_same(*both: Conditioning | None) -> None:
    """The same values, or both are None."""
    for field in fields(Conditioning):
        ours, theirs = (getattr(one, field.name, "none") for one in both)
        same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert same, field.name


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_batch_is_encoded_once(model: FlowModel, calls: list[int], guidance: float) -> None:
    spec = make_spec("sde", guidance)
    known = PromptCache({}, None, by_batch=True, limit=2**20)
    once = [2, 2] if guidance > 1 else [2]  # distinct prompts, and negatives
    for prompts, expected in ((PROMPTS, once), (PROMPTS[:2], []), (PROMPTS[1:], once)):
        calls.clear()
        found = encode_prompts(model, prompts, spec, known)
        assert calls == expected
        for ours, theirs in zip(found, encode_prompts(model, prompts, spec), strict=True):
            assert_same(ours, theirs)


def test_what_goes_beyond_the_limit_is_encoded_each_time(
    model: FlowModel, calls: list[int]
) -> None:
    spec = make_spec("sde", 1.0)
    once, _ = encode_prompts(model, PROMPTS[:1], spec)
    size = sum(tensor.nbytes for tensor in once.tensors().values())
    known = PromptCache({}, None, by_batch=True, limit=size)
    calls.clear()
    for _ in range(3):
        encode_prompts(model, PROMPTS[:1], spec, known)
        encode_prompts(model, PROMPTS[1:], spec, known)
    assert calls == [1, 2, 2, 2]


def test_evaluations_after_the_first_call_no_encoder(model: FlowModel, calls: list[int]) -> None:
    config = RolloutConfig(
        pipeline=PipelineConfig(height=16, width=32, num_inference_steps=2),
        val_kwargs=EvaluationConfig(num_inference_steps=2, guidance_scale=2.0),
    )
    task = ImageTask(model, FlowPolicy(model, model.network), config, seed=0)
    first, again = (task.sample(PROMPTS, range(len(PROMPTS))) for _ in range(2))
    assert len(calls) == 2
    assert np.array_equal(first.samples, again.samples)


@pytest.mark.parametrize(
    ("name", "in_folder"),
    [
        ("StableDiffusion3Pipeline", False),
        *((name, True) for name in sorted(adapters_by_pipeline())),
    ],
)
def test_every_family_keeps_its_bits(
    name: str, in_folder: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prompts of one batch are asked for in others, unless these have other lengths."""
    subject = make_subject(name, saved)
    model, tiny = subject.load(), subject.tiny
    spec = tiny.spec("sde", tiny.guided)
    texts = ["ab", "cd", "two red cats and a dog", '"AB7X"']
    prompts = [
        Prompt(text=text, index=i, negative_text=texts[i - 1], images=tiny.images(i % 2))
        for i, text in enumerate(texts)
    ]
    # The first four have every prompt in batches of 1, 2 or 4 that is asked for.
    places = ([0, 1, 2, 3], [1, 3], [0, 2], [2], [3, 1, 0, 2], [0, 1], [2, 0, 2])
    batches = [[prompts[place] for place in rows] for rows in places]
    by_batch = model.pads_to_longest
    cache = PromptCache({}, tmp_path if in_folder else None, by_batch=by_batch)
    for asked, negative in product(batches if by_batch else batches[:4], (False, True)):
        encode_unique(model, asked, spec, negative=negative, cache=cache)
    names = ["encode", *(["encode_edits"] if isinstance(model, EditingModel) else [])]
    again = {name: Mock(side_effect=AssertionError("encoded again")) for name in names}
    for asked, negative in product(batches, (False, True)):
        expected = encode_unique(model, asked, spec, negative=negative)
        with patch.multiple(model, **again):
            found = encode_unique(model, asked, spec, negative=negative, cache=cache)
        if found.images is not None and expected.images is not None:
            shown = found.images[:, : expected.images.shape[1]]  # the rest is padding
            found = replace(found, images=shown)
        assert_same(found, expected.counted())


SPEC = make_spec("sde", 1.0)
EDITS = [("A", ()), ("B", (b"a picture",))]
ROWS = Conditioning(embeds=torch.arange(24.0).view(2, 4, 3))


def test_a_prompt_without_a_token_keeps_its_padding() -> None:
    empty = Conditioning(embeds=torch.zeros(1, 3, 2), mask=torch.zeros(1, 3, dtype=torch.bool))
    cache = PromptCache({}, None)
    cache.keep(EDITS[:1], SPEC, True, empty)
    assert_same(cache.find(EDITS[:1], SPEC, True), empty.counted())


@pytest.mark.parametrize("damage", ["truncated", "another", "no file of ours"])
def test_a_damaged_file_is_encoded_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PromptCache({}, tmp_path)
    cache.keep(EDITS, SPEC, False, ROWS)
    first, second = sorted(tmp_path.rglob("*.safetensors"))
    content = {"truncated": first.read_bytes()[:-1], "another": second.read_bytes()}
    first.write_bytes(content.get(damage, b"hello"))
    assert cache.find(EDITS, SPEC, False) is None
    (told,) = caplog.messages
    assert str(first) in told
    cache.keep(EDITS, SPEC, False, ROWS)
    assert_same(cache.find(EDITS, SPEC, False), ROWS)


def test_what_changes_an_encoding_is_looked_for(tmp_path: Path) -> None:
    cache = PromptCache({"dtype": "fp32"}, tmp_path)
    cache.keep(EDITS, SPEC, False, ROWS)
    assert PromptCache({"dtype": "fp32"}, tmp_path).find(EDITS, SPEC, False) is not None
    assert PromptCache({"dtype": "bf16"}, tmp_path).find(EDITS, SPEC, False) is None
    assert cache.find(EDITS, replace(SPEC, max_sequence_length=99), False) is None
    assert cache.find(EDITS, SPEC, True) is None
    for other in (("C", ()), ("A", (b"a picture",)), ("B", (b"another",))):
        assert cache.find([EDITS[0], other], SPEC, False) is None


def keep_often(folder: Path) -> None:
    cache = PromptCache({}, folder)
    with patch.object(cache, "_read", return_value=None):  # as if none had been written yet
        for _ in range(20):
            cache.keep(EDITS, SPEC, False, ROWS)


def test_several_writers_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(keep_often, [tmp_path, tmp_path]))
    assert_same(PromptCache({}, tmp_path).find(EDITS, SPEC, False), ROWS)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.suffix for path in files] == [".safetensors"] * len(EDITS)

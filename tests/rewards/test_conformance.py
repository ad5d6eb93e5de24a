"""What every reward of the package does.

A sample gets one number, the same again, whichever samples are in the batch. A new file in
flowgrpo_rc/rewards fails here until `options` has it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.reward_servers import Received, answering, chat, scripted, shown
from support.tiny_rewards import CLIP_FEATURES, save_clip, save_head, save_image_reward
from support.tiny_vlm import save_vlm_reward

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import available_plugins, build, load_class
from flowgrpo_rc.rewards.base import Reward
from flowgrpo_rc.rewards.http.client import JsonClient
from flowgrpo_rc.rewards.http.wire import decode, decode_png, encode_png
from flowgrpo_rc.rewards.manager import PACKAGE
from flowgrpo_rc.rewards.vlm.models import LocalVlm, VlmServer

TEXTS = (
    "a red dog",
    "the cat",
    "a red dog",
    "two of the dog and much more than there is room for in a text",
)

_SOURCE = np.full((20, 30, 3), 90, dtype=np.uint8)
_SOURCE[5:15, 8:22] = 10  # something that letter_colour takes for a letter
SOURCE = base64.b64decode(encode_png(_SOURCE))


def brightness(sample: Any, prompt: Prompt) -> float:
    return float(np.asarray(sample).mean()) + prompt.index


def answer(received: Received) -> object:
    """Answers as a reward server, a detector and a vision-language model."""
    if received.path == "/v1/detect":
        images = [decode_png(image) for image in received.body["images"]]
        dogs = [{"class": "dog", "box": [0, 0, 4, 4]}]
        return {"objects": [dogs * int(image[0, 0, 0] // 64) for image in images]}
    if received.path == "/v1/chat/completions":
        words = received.body["messages"][0]["content"][-1]["text"]
        level = shown(received)[0]
        return chat(f"{level % 3}" if "Answer with" in words else f"dog{level}")
    samples, prompts = decode(received.body)
    return {"values": [brightness(*pair) for pair in zip(samples, prompts, strict=True)]}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """The options with which each reward runs here, by its name."""
    folder = tmp_path_factory.mktemp("rewards")
    clip = {"path": str(save_clip(folder / "clip")), "device": "cpu", "batch_size": 3}
    blip = str(save_image_reward(folder / "blip"))
    head = str(save_head(folder / "head.safetensors", CLIP_FEATURES))
    edits = str(save_vlm_reward(folder / "edits", heads=2))
    hpsv3 = str(save_vlm_reward(folder / "hpsv3"))
    with scripted(answering(answer)) as server:
        chat = {"url": f"{server.url}/v1", "model": "tiny", "concurrency": 2}
        yield {
            "aesthetic": clip | {"head": head},
            "clip": clip,
            "edit_reward": {"path": edits, "device": "cpu", "dtype": "fp32", "batch_size": 3},
            "exact_match": {},
            "function": {"path": f"{__name__}:brightness"},
            "geneval": {"url": server.url, "batch_size": 2},
            "hpsv2": clip,
            "hpsv3": {"path": hpsv3, "device": "cpu", "dtype": "fp32", "batch_size": 3},
            "image_reward": {"path": blip, "device": "cpu", "batch_size": 3},
            "jpeg": {},
            "letter_colour": {},
            "ocr": {},
            "pickscore": {**clip, "processor": clip["path"]},
            "remote": {"url": server.url, "batch_size": 3},
            "video_clip": {**clip, "every": 2},
            "video_ocr": {"every": 2},
            "vlm_judge": chat,
            "vlm_ocr": chat,
            "vlm_preference": chat,
        }


CASES = available_plugins(PACKAGE, Reward)
FURTHER = {
    **dict.fromkeys(("geneval", "remote", "a VLM's server"), ", a server's"),
    **dict.fromkeys(("vlm_judge", "vlm_ocr", "vlm_preference"), ", a VLM's"),
    "video_clip": ", those of `clip`",
    "video_ocr": ", those of `ocr`",
}
CLIPS = ("aesthetic", "clip", "hpsv2", "pickscore", "video_clip")
WITH_WEIGHTS = [*CLIPS, "edit_reward", "hpsv3", "image_reward"]
# Those that read pixels themselves; those of videos are means of these.
OF_PICTURES = [*CLIPS[:-1], "edit_reward", "hpsv3", "image_reward", "letter_colour", "ocr"]


def make(name: str, options: dict[str, dict[str, Any]], **changes: Any) -> Reward:
    return build(load_class(PACKAGE, name, Reward), options[name] | changes, name)


@pytest.fixture(scope="module")
def rewards(options: dict[str, dict[str, Any]]) -> Callable[[str], Reward]:
    """Returns a reward by its name; each is made and loaded once."""
    return cache(lambda name: make(name, options))


def prompts(count: int) -> list[Prompt]:
    wanted = {"include": [{"class": "dog", "count": 2}], "exclude": [{"class": "dog", "count": 3}]}
    return [
        Prompt(
            text=TEXTS[index % len(TEXTS)],
            index=index,
            target=f"dog{index}",
            metadata=wanted | {"colour": [200, 30, 10]},
            images=(SOURCE,),
        )
        for index in range(count)
    ]


def asked_of(reward: Reward, count: int) -> list[Prompt]:
    """Returns the prompts of a call; those of a group are one."""
    return [prompts(1)[0]] * count if reward.groupwise else prompts(count)


def samples_of(reward: Reward, count: int, *, height: int = 24, width: int = 40) -> Any:
    if reward.kind == "text":
        return [f"dog{index // 2}" for index in range(count)]
    shape = (count, 5, height, width, 3) if reward.kind == "video" else (count, height, width, 3)
    return np.random.default_rng(count).integers(0, 256, shape, dtype=np.uint8)


def keys(component: type) -> str:
    """Returns the keyword parameters of a reward with their defaults, as docs/rewards.md does."""
    words = []
    for name, parameter in signature(component).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            continue
        assert parameter.kind is Parameter.KEYWORD_ONLY
        default = parameter.default
        shown = default if isinstance(default, str) else ""
        if default is not Parameter.empty and not shown:
            shown = json.dumps(list(default) if isinstance(default, tuple) else default)
        value = f" (`{shown}`)" if shown else ""
        words.append(f"`{name}`{value if len(shown) < 80 else ' (in its file)'}")
    return ", ".join(words)


@pytest.mark.parametrize(
    ("name", "component", "further"),
    [
        ("a server's", JsonClient, ""),
        ("a VLM's server", VlmServer, FURTHER["a VLM's server"]),
        ("a VLM of this process", LocalVlm, ""),
        *(
            (f"`{name}`", load_class(PACKAGE, name, Reward), FURTHER.get(name, ""))
            for name in CASES
        ),
    ],
)
def test_the_documentation_has_every_key_and_default(name, component, further):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (row,) = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert row[2 if name.startswith("`") else 1].removesuffix(" |") == keys(component) + further


@pytest.mark.parametrize("name", CASES)
def test_one_finite_number_for_each_sample_in_any_batch(name, rewards):
    reward = rewards(name)
    samples = samples_of(reward, 4)
    of_samples = asked_of(reward, 4)
    before = samples.copy()
    scores = reward(samples, of_samples)
    assert np.array_equal(samples, before), "samples are read only"
    assert [math.isfinite(value) for value in scores.values] == [True] * 4
    lengths = {name: len(part) for name, part in scores.parts.items()}
    assert lengths == dict.fromkeys(reward.part_names, 4)
    reversed_order = reward(samples[::-1], of_samples[::-1]).values
    assert list(reversed_order)[::-1] == pytest.approx(list(scores.values), abs=2e-5)
    assert reward(samples[1:3], of_samples[1:3]) == reward(samples[1:3], of_samples[1:3])
    if not reward.groupwise:
        pair = reward(samples[1:3], of_samples[1:3]).values
        assert list(pair) == pytest.approx(list(scores.values[1:3]), abs=2e-5)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_scores_tell_samples_apart_and_half_precision_is_near(name, rewards, options):
    reward = rewards(name)
    samples = samples_of(reward, 3)
    scores = np.asarray(reward(samples, prompts(3)).values)
    assert np.ptp(scores) > 1e-3
    if name != "aesthetic":  # it ignores the prompt
        first, second = reward(np.repeat(samples[:1], 2, axis=0), prompts(2)).values
        assert abs(first - second) > 1e-4
    half = np.asarray(make(name, options, dtype="bf16")(samples, prompts(3)).values)
    assert np.abs(half - scores).max() < 0.1 * max(1.0, np.abs(scores).max())
    assert (half != scores).any()


@pytest.mark.parametrize("name", OF_PICTURES)
def test_any_size(name, rewards):
    """A size that a reward cannot take raises; it never gives numbers for some samples only."""
    reward = rewards(name)
    for height, width in ((1, 1), (1, 50), (97, 16)):
        samples = samples_of(reward, 2, height=height, width=width)
        samples[1] = 255
        try:
            values = reward(samples, asked_of(reward, 2)).values
        except Exception:
            assert height < 16
        else:
            assert {math.isfinite(value) for value in values} in ({True}, {height > 1})


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_bad_options_fail_before_anything_is_loaded(name, options, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for change, message in (
        ({"device": "gpu"}, r"device='gpu': give auto, cpu, cuda or cuda:1"),
        ({"device": "cuda"}, r"torch finds no CUDA device"),
        ({"batch_size": 0}, r"batch_size=0: give a whole number of at least 1"),
        ({"dtype": "int8"}, r"dtype='int8': allowed are fp32, bf16, fp16"),
        ({"path": str(tmp_path)}, r"no config\.json"),
        ({"batchsize": 2}, r"unknown option \(did you mean 'batch_size'\?\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make(name, options, **change)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_another_device_gives_the_same_scores(name, options):
    reward = make(name, options)
    other = make(name, options, device="cuda:0")
    samples = samples_of(reward, 5)
    wanted = reward(samples, prompts(5)).values
    assert other(samples, prompts(5)).values == pytest.approx(wanted, abs=1e-3)


def test_a_processor_elsewhere(options, monkeypatch):
    """`~` is the user's folder. A processor that is nowhere is refused before anything loads."""
    home = Path(options["clip"]["path"]).parent
    name = Path(options["clip"]["path"]).name
    monkeypatch.setenv("HOME", str(home))
    reward = make("pickscore", options, path=f"~/{name}", processor=f"~/{name}")
    samples = samples_of(reward, 2)
    assert reward(samples, prompts(2)) == make("pickscore", options)(samples, prompts(2))
    with pytest.raises(ValueError, match=r"processor='~/none': there is no such folder"):
        make("pickscore", options, processor="~/none")


@pytest.mark.parametrize(
    ("name", "save"), [("clip", save_clip), ("image_reward", save_image_reward)]
)
def test_a_checkpoint_of_another_model_is_refused(name, save, options, tmp_path: Path):
    """Only names of the text encoder fit; what is missing would be random."""
    file = save(tmp_path / "half") / "model.safetensors"
    tensors = load_file(file)
    text = {key: tensor for key, tensor in tensors.items() if not key.startswith("vision")}
    save_file(text, file, metadata={"format": "pt"})
    reward = make(name, options, path=str(tmp_path / "half"))
    words = r"half/model\.safetensors lacks .*embedding.* which a \w+ needs"
    with pytest.raises(ValueError, match=words):
        reward(samples_of(reward, 1), prompts(1))

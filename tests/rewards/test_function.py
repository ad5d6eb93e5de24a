"""A user's function as a reward: what it gets, what it may return, and what the manager does."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.prompts import sums

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores, finite_numbers
from flowgrpo_rc.rewards.function import Function, give
from flowgrpo_rc.rewards.groups import Groups
from flowgrpo_rc.rewards.manager import (
    RewardConfig,
    RewardManager,
    build_terms,
    check_kind,
    check_prompts,
    needs_samples,
)

HERE = __name__
IMAGES = np.zeros((2, 8, 8, 3), np.uint8)


def length(sample, prompt):
    return float(len(sample)) + prompt.index


class Unknown(Reward):
    kind = "sound"

    def __call__(self, samples, prompts):
        return Scores(values=[0.0] * len(samples))


NOT_A_FUNCTION = 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "length"}, "write it as my_package.my_module:name"),
        ({"path": "..relative:score"}, "write it as"),
        ({"path": "no_such_module:score"}, "no module 'no_such_module'; is its folder on PYTHON"),
        ({"path": "my_reward.py:score"}, "no module .my_reward.py.; write it without .py"),
        ({"path": f"{HERE}:missing"}, "has no function 'missing'"),
        ({"path": f"{HERE}:NOT_A_FUNCTION"}, "has no function 'NOT_A_FUNCTION'"),
        ({"path": "no_library:score"}, "no_library cannot be imported: ModuleNotFoundError: No mo"),
        ({"path": "no_python:score"}, r"imported: SyntaxError: .*\(no_python.py, line 1\)"),
        ({}, "Function needs the option path"),
    ],
)
def test_paths_that_lead_to_no_function(
    options: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_library.py").write_text("import a_library_nobody_has\n")
    (tmp_path / "no_python.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"reward\.terms\.function: .*{message}"):
        build_terms(RewardConfig(terms={"function": options}))


FUNCTION = {"_target_": "function", "path": f"{HERE}:length"}


@pytest.mark.parametrize(
    ("terms", "kind", "message"),
    [
        ({"jpeg": {}, "f": FUNCTION}, "image", ""),
        ({"exact_match": {}, "f": FUNCTION, "ocr": None}, "text", ""),
        ({"ocr": {}}, "text", r"\.ocr scores images, and the model makes texts: drop it"),
        (
            {"match": {"_target_": "exact_match", "weight": 0.0}, "jpeg": {}},
            "image",
            r"\.match scores texts, and the model makes images",
        ),
        ({"jpeg": {}, "f": FUNCTION}, "video", r"\.jpeg scores images, .* makes videos: drop it"),
        ({"latent": FUNCTION | {"kind": "latent"}}, "text", r"\.latent scores latents, .* texts"),
        (
            {"x": {"_target_": f"{HERE}.Unknown"}},
            "image",
            r"\.x: Unknown\.kind='sound': allowed are image, video, text, latent, any",
        ),
    ],
)
def test_a_reward_must_fit_the_model(terms, kind, message):
    refused = pytest.raises(ValueError, match=rf"reward\.terms{message}")
    with refused if message else nullcontext():
        check_kind(build_terms(RewardConfig(terms=terms)), kind)


LATENTS = torch.arange(8.0).reshape(2, 2, 2)
LATENT = {"_target_": "function", "path": f"{HERE}:mean", "kind": "latent"}
IMAGE = {**LATENT, "kind": "image"}


def mean(sample, prompt):
    return float(sample.mean())


def test_each_reward_gets_what_it_scores():
    manager = RewardManager(RewardConfig(terms={"latent": LATENT, "image": IMAGE}))
    rewards = manager.collect([manager.submit(IMAGES, sums("1", "2"), LATENTS)])
    assert rewards.parts["latent"].tolist() == [1.5, 5.5]
    assert rewards.parts["image"].tolist() == [0.0, 0.0]
    manager.close()
    assert manager.needs_samples
    assert needs_samples(
        build_terms(RewardConfig(terms={"latent": LATENT, "image": {**IMAGE, "weight": 0.0}}))
    )
    alone = RewardConfig(terms={"latent": LATENT})
    manager = RewardManager(alone)
    rewards = manager.collect([manager.submit(None, sums("1", "2"), LATENTS)])
    manager.close()
    assert rewards.total.tolist() == [1.5, 5.5]
    assert not manager.needs_samples
    assert not needs_samples(build_terms(alone))


HALF = [
    *[torch.tensor(0.5, dtype=getattr(torch, name)) for name in ("half", "bfloat16", "double")],
    torch.tensor(0.5).to(torch.float8_e4m3fn),
    torch.tensor([0.5], requires_grad=True),
    *[np.array(0.5, dtype) for dtype in (np.float16, np.float64, np.longdouble, object)],
    Fraction(1, 2),
    Decimal("0.5"),
]
ONE = [
    True,
    *[torch.ones((), dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int64)],
    *[kind(1) for kind in (np.float16, np.bool_, np.uint8, np.int64)],
    np.array([[True]]),
]
NONE = [None, {"f": 0.5}, "0.5", b"1", [0.5], 0.5j, np.complex64(1), 10**400, float("inf")]


@pytest.mark.parametrize(
    ("returned", "number"),
    [
        (HALF, 0.5),
        (ONE, 1.0),
        (NONE, None),
        ([np.zeros(2), torch.zeros(2), torch.zeros(0)], None),
    ],
    ids=["half", "one", "none", "several"],
)
def test_what_a_function_may_return_as_its_number(returned, number):
    reward = Function(path=give("f", lambda sample, prompt: sample))
    scores = finite_numbers(reward(returned, sums(*["1"] * len(returned))).values)
    wanted = [math.nan if number is None else number] * len(returned)
    assert scores == pytest.approx(wanted, nan_ok=True)


class Painter(Reward):
    """Writes into all that it is given, by torch, which asks no flag of an array."""

    def __init__(self, *, kind: str = "image", groupwise: bool = False) -> None:
        self.kind = kind
        self.groupwise = groupwise

    def __call__(self, samples, prompts):
        torch.as_tensor(samples)[...] = 200
        prompts[0].metadata["words"].append("painted")
        return Scores(values=[0.0] * len(samples))


def look(sample, prompt):
    return float(sample.max()) + len(prompt.metadata["words"])


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_reward_that_changes_its_samples_changes_them_for_itself(kind):
    """The next reward sees what was sampled, and so does the caller."""
    painter = f"{HERE}.Painter"
    look_at = {"_target_": "function", "path": f"{HERE}:look"}
    terms = {
        "chunk": {"_target_": painter, "kind": kind},
        "group": {"_target_": painter, "kind": kind, "groupwise": True},
        "latent": {"_target_": painter, "kind": "latent"},
        "look": look_at,
        "look_at_latents": look_at | {"kind": "latent"},
    }
    manager = RewardManager(RewardConfig(terms=terms))
    samples = np.zeros((2, 8, 8, 3) if kind == "image" else (2, 3, 8, 8, 3), np.uint8)
    latents = torch.zeros(2, 4)
    prompts = [Prompt(text="a", index=0, metadata={"words": []})] * 2
    handle = manager.submit(samples, prompts, latents, Groups(of=[0, 0], size=2))
    assert manager.collect([handle]).total.tolist() == [0.0, 0.0]
    manager.close()
    assert not samples.any()
    assert not latents.any()
    assert prompts[0].metadata == {"words": []}


# --- Parameters: our form and TRL's

ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"})
CHAT = Prompt(text="1+2?", index=0, target="3", metadata={"answer": "3", "of": 7}, messages=ASKED)
PLAIN = Prompt(text="2+2?", index=1, target="4", metadata={"answer": "4", "of": 8})


def called(function: Callable[..., Any], samples: list[str], *prompts: Prompt) -> Any:
    return list(Function(path=give("f", function))(samples, prompts).values)


def config_of(function: Callable[..., Any]) -> RewardConfig:
    return RewardConfig(terms={"f": {"_target_": "function", "path": give("f", function)}})


OTHER = ["answer", "prompt", "target"]
OTHERS = ["answer", "prompts", "target"]
PAIRS = [("three", 0), ("4", 1)]
SAID = [[{"role": "assistant", "content": "three"}], "4"]


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        (lambda completions: completions, SAID),
        (lambda prompts, completions: prompts, [list(ASKED), "2+2?"]),
        (lambda completions, target, *, nothing=5: [*target[:1], nothing], ["3", 5]),
        (lambda completions, of=5, **others: [of, sorted(others)], [[7, 8], OTHERS]),
        (lambda responses: responses, ["three", "4"]),
        (partial(lambda completions, scale: [scale] * 2, scale=2), [2, 2]),
        (lambda prompt, image: (image, prompt.index), PAIRS),
        (lambda image, prompt=None: (image, prompt.index), PAIRS),
        (lambda sample, text: (sample, text.index), PAIRS),
        (lambda x, _: (x, _.index), PAIRS),
        (lambda x, caption=None, *, scale=2: (x, caption.index + scale - 2), PAIRS),
        (lambda completion, scale=2: (completion, scale - 2), [("three", 0), ("4", 0)]),
        (lambda answer, prompt: (answer, prompt.index), PAIRS),
        (lambda *both: (both[0], both[1].index), PAIRS),
        (lambda target, response: target, ["3", "4"]),
        (lambda x, answer: (x, answer), [("three", "3"), ("4", "4")]),
        (lambda image, *, of=0, other=1: (of, other), [(7, 1), (8, 1)]),
        (lambda image, of, **others: sorted(others), [OTHER, OTHER]),
    ],
)
def test_a_function_gets_what_its_parameters_are_called(
    function: Callable[..., Any], scores: list[Any]
) -> None:
    """In the plural once for all samples and as TRL has it, else for each sample."""
    assert called(function, ["three", "4"], CHAT, PLAIN) == scores


NO = "no column of the prompts is called"
CALLED = "it is called with a sample and its prompt, or by name: one of sample, image"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda image, images: 0, CALLED),
        (lambda prompt, completions: 0, CALLED),
        (lambda prompt, target: 0, CALLED),
        (lambda prompts, **kwargs: 0, CALLED),
        (lambda x, image: 0, f"{NO} x; there are answer, of, target, prompt, image"),
        (lambda completions, ids: 0, f"{NO} ids; there are answer, of, target, prompt"),
        (lambda completion, answers: 0, f"{NO} answers; .* of, target, prompt, completion"),
    ],
)
def test_names_that_nobody_can_give_are_refused_before_a_run(
    function: Callable[..., Any], message: str
) -> None:
    full = rf"reward\.terms\.f: path='given:f' takes \(.*\)[:;] {message}"
    with pytest.raises(ValueError, match=full):
        check_prompts(build_terms(config_of(function)), [CHAT, PLAIN], lambda: ["line 0", "line 1"])


def test_a_column_that_some_prompts_lack_is_refused() -> None:
    both = [CHAT, Prompt(text="a", index=1)]
    for function in (lambda completion, answer: 0, lambda completions, answer: [0, 0]):
        with pytest.raises(ValueError, match=r"line 1: reward\.terms\.f: .*answer"):
            check_prompts(build_terms(config_of(function)), both, lambda: ["line 0", "line 1"])
    assert called(lambda completions, answer=1: answer, ["", ""], *both) == ["3", None]


def test_what_a_function_of_lists_returns_gets_a_value_or_a_sentence() -> None:
    for returned, kind in (({"f": [1.0]}, "dict"), (np.array(0.5), "float"), (None, "NoneType")):
        manager = RewardManager(config_of(lambda completions, it=returned: it))
        rewards = manager.collect([manager.submit(["a", "b"], [CHAT, PLAIN])])
        manager.close()
        message = f"scores must be a list, array or tensor, not a {kind}"
        assert message in manager.last_error["f"]
        assert not rewards.valid.any()

"""Checks what a reward function gets, by the names of its parameters: our form and TRL's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.function import Function, give
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager, build_terms, check_prompts

ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"})
CHAT = Prompt(text="1+2?", index=0, target="3", metadata={"answer": "3", "of": 7}, messages=ASKED)
PLAIN = Prompt(text="2+2?", index=1, target="4", metadata={"answer": "4", "of": 8})


def called(function: Callable[..., Any], samples: list[str], *prompts: Prompt) -> Any:
    return list(Function(path=give("f", function))(samples, prompts).values)


def terms(function: Callable[..., Any]) -> RewardConfig:
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
        check_prompts(build_terms(terms(function)), [CHAT, PLAIN], lambda: ["line 0", "line 1"])


def test_a_column_that_some_prompts_lack_is_refused() -> None:
    both = [CHAT, Prompt(text="a", index=1)]
    for function in (lambda completion, answer: 0, lambda completions, answer: [0, 0]):
        with pytest.raises(ValueError, match=r"line 1: reward\.terms\.f: .*answer"):
            check_prompts(build_terms(terms(function)), both, lambda: ["line 0", "line 1"])
    assert called(lambda completions, answer=1: answer, ["", ""], *both) == ["3", None]


def test_what_a_function_of_lists_returns_gets_a_value_or_a_sentence() -> None:
    for returned, kind in (({"f": [1.0]}, "dict"), (np.array(0.5), "float"), (None, "NoneType")):
        manager = RewardManager(terms(lambda completions, it=returned: it))
        rewards = manager.collect([manager.submit(["a", "b"], [CHAT, PLAIN])])
        manager.close()
        message = f"scores must be a list, array or tensor, not a {kind}"
        assert message in manager.last_error["f"]
        assert not rewards.valid.any()

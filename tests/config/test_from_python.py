"""Checks what Python gives in place of a command line: arguments, prompts and callbacks."""

from __future__ import annotations

import json
import sys
import traceback
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import flowgrpo_rc
from flowgrpo_rc import Run
from flowgrpo_rc.config.from_python import given_prompts

KEY = "data.train_files"
ROWS = [{"prompt": "a red car", "target": "x"}, {"prompt": "a blue dog", "target": "y"}]


class Table:
    """Gives the names of its columns, as a table of pandas does."""

    def __iter__(self) -> Iterator[str]:
        return iter(("prompt", "target"))


TEXTS = (["a red car", "K9Q", "1+2="], ("Halt! Stop.", "e.g. a cat"))
COLUMN = UserList(["a cat"])  # a sequence that is no list, as a column of a datasets.Dataset


@pytest.mark.parametrize("texts", [*TEXTS, COLUMN])
def test_prompts_may_be_texts(texts: Sequence[str]) -> None:
    lines = given_prompts({KEY: texts})[KEY].splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": text} for text in texts]


@pytest.mark.parametrize(
    "paths",
    ["my prompts.txt", Path("prompts"), ["a.txt", "my b.jsonl"], ["wrong.tx"], ["data/prompts"]],
)
def test_paths_stay_paths(paths: object) -> None:
    assert given_prompts({KEY: paths}) == {}
    assert given_prompts([f"{KEY}={paths}"]) == {}


def test_what_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    assert given_prompts({KEY: ["words"]}) == {}
    assert given_prompts({KEY: ["others"]}) != {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a red car", "b.txt"], r"'b\.txt' does not fit"),
        ({"train": ROWS, "test": ROWS}, r"here of a dict; 'train' does not fit"),
        (Table(), r"here of a Table; 'prompt' does not fit"),
        ([{"prompt": "a"}, 3], r"here of a list; 3 does not fit"),
        (iter(()), r"here of a tuple_iterator; it holds nothing"),
    ],
)
def test_other_prompts_are_refused(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\.train_files: give files, .*{words}"):
        given_prompts({KEY: given})


def test_prompts_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^data\.val_files=a/b: no such file .*pip install"):
        given_prompts({"data.val_files": "a/b"})

    def load_dataset(name: str, *, split: str) -> list[dict[str, str]]:
        if name == "a/none":
            raise ConnectionError("no\nnetwork")
        return [{"prompt": f"{name} {split}"}]

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    given = {KEY: "a/b", "data.val_files": "a/b.c:train[:10]"}
    assert given_prompts(given) == {
        KEY: '{"prompt": "a/b train"}',
        "data.val_files": '{"prompt": "a/b.c train[:10]"}',
    }
    with pytest.raises(ValueError, match=r"part 'train' of a dataset .*a/none:PART.*: no network$"):
        given_prompts({KEY: "a/none"})


NAMES: tuple[tuple[Callable[..., object], str, str], ...] = (
    (flowgrpo_rc.train, "reward", "did you mean 'rewards'"),
    (flowgrpo_rc.train, "callback", "did you mean 'callbacks'"),
    (flowgrpo_rc.train, "overrides", "did you mean 'config'"),
    (flowgrpo_rc.plan, "fits", "did you mean 'fit'"),
    (Run.resume, "config_name", r"resume has no argument 'config_name'; help\(resume\) lists"),
)


@pytest.mark.parametrize(("call", "name", "words"), NAMES)
def test_a_misspelt_argument(call: Callable[..., object], name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(**{name: 3})


CALLBACKS = (
    (print, "give a list"),
    (None, "give a list"),
    ([3], "give a list"),
    ([lambda step: None], r"gets \(step, metrics\): too many positional"),
)


@pytest.mark.parametrize(("callbacks", "words"), CALLBACKS)
def test_callbacks_are_checked_before_anything_is_composed(callbacks: object, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^callbacks.*{words}"):
        flowgrpo_rc.train({"no.such_key": 1}, callbacks=callbacks)  # type: ignore[arg-type]


JPEG = {"jpeg": {"weight": 1}}
CALLS: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: flowgrpo_rc.train("rollout.n=8"), r"give a list of overrides"),
    (lambda: flowgrpo_rc.train({"rollout.n": {1, 2}}), r"rollout\.n=\{1, 2\}: a setting is a text"),
    (lambda: flowgrpo_rc.train({"rolout.n": 8}), r"did you mean"),
    (lambda: flowgrpo_rc.train({"model.path": "a/b/c"}), r"a/b/c"),
    (lambda: flowgrpo_rc.train(rewards={"ocr": 1}), r"'ocr'\]=1 is no.*\{\"ocr\": \{\"weight\": 1"),  # type: ignore[dict-item]
    (lambda: flowgrpo_rc.train(rewards="ocr"), r"rewards='ocr': each .*\"ocr\": \{\"weight\""),  # type: ignore[arg-type]
    (lambda: flowgrpo_rc.train({"reward.terms": {"jpg": {}}}, rewards=JPEG), r"you mean 'jpeg'"),
    (lambda: flowgrpo_rc.train(["reward.terms.f.weight=2"], rewards=JPEG), r"jpeg: add 'f' to r"),
    (lambda: flowgrpo_rc.evaluate("nowhere"), r"nowhere is not the folder of a run"),
    (lambda: flowgrpo_rc.compare("nowhere"), r"\w"),
    (lambda: flowgrpo_rc.plan(fit=-1), r"\w"),
    (lambda: flowgrpo_rc.export("nowhere", "out"), r"\w"),
)


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_input_reaches_a_notebook_before_anything_is_loaded_and_without_its_causes(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    names = [frame.name for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert names[-1] == "called"
    assert len(names) == 3  # this function, the lambda and the edge of the package


def test_a_folder_that_is_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nowhere is not the folder of a run"):
        Run(Path("nowhere"))

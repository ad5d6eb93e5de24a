"""Digests of the files that a run reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.records.inputs import (
    LARGE,
    Input,
    changed_inputs,
    code_input,
    file_input,
    model_inputs,
    prompts_input,
    write_inputs,
)


def inputs(**digests: str) -> dict[str, Input]:
    return {name.replace("_", "/"): Input(f"here/{name}", value) for name, value in digests.items()}


def test_a_changed_file_is_named_and_one_side_alone_is_not(tmp_path: Path) -> None:
    record = tmp_path / "inputs.json"
    read = inputs(same="1", changed="1", gone="1")
    assert changed_inputs(record, read) == []  # an older run has no record
    write_inputs(record, read)
    assert changed_inputs(record, read) == []
    read = inputs(same="1", changed="2", new="1")
    assert changed_inputs(record, read) == ["changed: the content of here/changed has changed"]
    write_inputs(record, inputs(new="1"))
    (change,) = changed_inputs(record, inputs(gone="2"))
    assert change.startswith("gone:")


def test_all_weights_of_a_folder_may_not_become_others(tmp_path: Path) -> None:
    record = tmp_path / "inputs.json"
    one = {"model.path/unet/a.safetensors": Input("a", "1")}
    other = {"model.path/unet/b.safetensors": Input("b", "1")}
    write_inputs(record, one | other)
    assert changed_inputs(record, one) == []  # a variant that nobody has read
    record.unlink()
    write_inputs(record, one)
    assert changed_inputs(record, one | other) == []
    (change,) = changed_inputs(record, other)
    assert change.startswith("model.path/unet: the weights that the run began with are gone")
    assert changed_inputs(record, {}) == []  # the hub's cache is empty: it is fetched again


def prompt(text: str, **further: object) -> Prompt:
    return Prompt(text=text, index=0, **further)


@pytest.mark.parametrize(
    "others",
    [
        [prompt("a")],
        [prompt("b"), prompt("a")],
        [prompt("a"), prompt("b"), prompt("c")],
        [prompt("a"), prompt("b", target="x")],
        [prompt("a"), prompt("b", negative_text="x")],
        [prompt("a"), prompt("b", metadata={"tag": 1})],
    ],
    ids=["halved", "reordered", "added", "target", "negative", "metadata"],
)
def test_other_prompts_have_another_digest(others: list[Prompt]) -> None:
    read = [prompt("a"), prompt("b")]
    assert prompts_input([Path("x")], read).digest == prompts_input([Path("y")], read).digest
    assert prompts_input([Path("x")], read).digest != prompts_input([Path("x")], others).digest


def test_the_digest_of_prompts_covers_their_images_wherever_they_lie(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path, content in zip(paths, (b"1", b"1", b"2"), strict=True):
        path.write_bytes(content)
    one, moved, changed, held = (
        prompts_input([Path("x")], [prompt("a", images=(image,))]).digest
        for image in (*map(str, paths), b"1")
    )
    assert one == moved == held != changed
    assert one != prompts_input([Path("x")], [prompt("a")]).digest


def test_the_digest_of_a_small_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert file_input(tmp_path / "file").digest == hashlib.sha256(b"content").hexdigest()


def test_the_digest_of_a_large_file_sees_its_size_and_places_all_over(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(LARGE + 3)  # sparse: it takes no room
    before = file_input(path).digest
    for place in (0, 2**14 - 1, LARGE // 2, LARGE + 2):
        block = b"x" * min(2**19, LARGE + 3 - place)  # retrained weights differ in long stretches
        for content, is_same in ((block, False), (b"\0" * len(block), True)):
            with path.open("r+b") as file:
                file.seek(place)
                file.write(content)
            assert (file_input(path).digest == before) is is_same
    with path.open("ab") as file:
        file.write(b"\0")
    assert file_input(path).digest != before


def test_files_of_a_model_are_its_descriptions_weights_and_vocabularies(tmp_path: Path) -> None:
    others = ("README.md", "a/b/c", "tokenizer/chat_template.jinja")
    for name in ("model_index.json", "vae/config.json", "vae/a.safetensors", *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = ["model.path/model_index.json", "model.path/tokenizer/chat_template.jinja"]
    names += ["model.path/vae/a.safetensors", "model.path/vae/config.json"]
    assert list(model_inputs("model.path", tmp_path)) == names


def test_code_that_was_executed_from_a_text_has_no_source_to_compare() -> None:
    space: dict[str, Any] = {"__name__": code_input.__module__}  # which has lines to be mistaken
    exec(compile("def score(): ...", "page.md", "exec"), space)
    assert code_input("reward.terms.own", space["score"]) == {}
    assert code_input("reward.terms.own", len) == {}
    assert (
        code_input("reward.terms.own", code_input)["reward.terms.own"].path[-11:] == ".code_input"
    )

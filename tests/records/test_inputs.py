"""Digests of the files that a run reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flowgrpo_rc.records.inputs import LARGE, changed_inputs, digest, files_of_model, write_inputs


def test_a_changed_file_is_named_and_one_side_alone_is_not(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("same", "changed", "gone")}
    for name, file in files.items():
        file.write_text(name)
    record = tmp_path / "inputs.json"
    assert changed_inputs(record, files) == []  # an older run has no record
    write_inputs(record, files)
    assert changed_inputs(record, files) == []
    files["changed"].write_text("other")
    files["new"] = tmp_path / "same"
    del files["gone"]
    assert changed_inputs(record, files) == ["changed"]
    write_inputs(record, {"new": files["new"]})
    assert changed_inputs(record, {"gone": tmp_path / "same"}) == ["gone"]


def test_the_digest_of_a_small_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert digest(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


@pytest.mark.parametrize("place", [0, 2**20 - 1, LARGE + 2])
def test_the_digest_of_a_large_file_sees_its_size_and_its_ends(tmp_path: Path, place: int) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(LARGE + 3)  # sparse: it takes no room
    before = digest(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert digest(path) != before
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\0")
    assert digest(path) == before
    with path.open("ab") as file:
        file.write(b"\0")
    assert digest(path) != before


def test_files_of_a_model_are_its_descriptions_weights_and_vocabularies(tmp_path: Path) -> None:
    for name in ("model_index.json", "README.md", "vae/config.json", "vae/a.safetensors", "a/b/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = ["model.path/model_index.json", "model.path/vae/a.safetensors"]
    names.append("model.path/vae/config.json")
    assert list(files_of_model("model.path", tmp_path)) == names

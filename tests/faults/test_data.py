"""A run goes on with the data and the model that it began with, or says what has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.faults import Trained, command, fault, mixed, words_of
from support.runs import STOP, WORDS


def lines(*words: str) -> str:
    return "".join(f'"{word}"\n' for word in words)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of `own` are."""
    return tmp_path_factory.mktemp("own") / "files"


@pytest.fixture
def own(
    place: Path,
    small: list[str],
    checkpoint: Path,
    trained: Callable[[Sequence[str]], Trained],
    tmp_path: Path,
) -> list[str]:
    """The words of a run that was stopped after its first step, and that reads files of its own."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(checkpoint, place / "model")
    for name in ("train", "val"):
        (place / f"{name}.txt").write_text(lines(*WORDS))
    settings = [
        *small,
        f"model.path={place / 'model'}",
        f"data.train_files={place / 'train.txt'}",
        f"data.val_files={place / 'val.txt'}",
    ]
    shutil.copytree(trained([*settings, STOP]).folder, tmp_path / "run")
    return words_of(settings)


def change_weights(model: Path) -> None:
    path = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1e-3}, path, metadata={"format": "pt"})


@fault(
    "the model's weights and all prompts are others at the same path",
    "the command is refused and names them",
)
def test_changed_inputs(own: list[str], place: Path) -> None:
    for name in ("train.txt", "val.txt"):
        (place / name).write_text(lines(*reversed(WORDS)))
    change_weights(place / "model")
    files = ("diffusion_pytorch_model.safetensors", "train.txt", "val.txt")
    command(*own).expect(2, "has changed", *files)


@fault("rows of metrics.jsonl are gone, or have no checkpoint", "the run goes on and says which")
def test_missing_rows(own: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(row for row in rows if '"step": 1,' not in row and '"step": 1}' not in row)
        + '{"step": 9}\n'
    )
    said = "steps from 9 on have no checkpoint: they are trained again"
    command(*own).expect(0, "lacks the rows of 1 steps, from 1", said)


DAMAGED = {
    "bytes": b"\x00\xff",
    "torn": b"model: [",
    "list": b"- 1\n",
    "keys": b"model: {path: 3, x: 1}\n",
}


@fault("config.yaml is damaged", "one line names the file")
@pytest.mark.parametrize(("content", "verb"), mixed(DAMAGED, ("train", "eval", "report")))
def test_damaged_config(begun: Path, small: list[str], verb: str, content: str) -> None:
    (begun / "config.yaml").write_bytes(DAMAGED[content])
    ended = command(*words_of(small)) if verb == "train" else command(verb, str(begun))
    if (verb, content) == ("report", "keys"):
        ended.expect(0)  # a page of a run of another version
    else:
        ended.expect(2, "config.yaml")

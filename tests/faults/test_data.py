"""A run goes on with the data and the model that it began with, or says what has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.faults import command, fault, words_of
from support.runs import WORDS


def lines(*words: str) -> str:
    return "".join(f'"{word}"\n' for word in words)


CHANGED = {
    "added": lines(*WORDS, "NEW"),
    "reordered": lines(*reversed(WORDS)),
    "halved": lines(*WORDS[:4]),
    "another target": lines("ZZZZ", *WORDS[1:]),
}


@pytest.fixture
def own(small: list[str], checkpoint: Path, tmp_path: Path) -> list[str]:
    """The words of a run that reads files of its own, interrupted after its first step."""
    shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text(lines(*WORDS))
    words = words_of(
        small,
        f"model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'train.txt'}",
        f"data.val_files={tmp_path / 'val.txt'}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
    )
    assert command(*words, "trainer.max_time=0.001").code == 75
    return words


def refused(words: list[str], file: str) -> None:
    """Fails unless a command is refused with the name of a file, and goes on if asked to."""
    ended = command(*words)
    assert ended.code == 2, ended.output
    assert "has changed" in ended.output
    assert file in ended.output
    accepted = command(*words, "trainer.accept_changed_inputs=true")
    assert accepted.code == 0, accepted.output
    assert file in accepted.output
    assert command(*words).code == 0  # it is the run's own now


@fault("the training prompts change", "the command is refused and names the file")
@pytest.mark.parametrize("change", CHANGED)
def test_training_prompts(own: list[str], tmp_path: Path, change: str) -> None:
    (tmp_path / "train.txt").write_text(CHANGED[change])
    refused(own, "train.txt")
    report = (tmp_path / "run" / "report.html").read_text()
    assert "goes on with other inputs" in report


@fault("the held-out prompts change", "the command is refused and names the file")
def test_held_out_prompts(own: list[str], tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(CHANGED["reordered"])
    refused(own, "val.txt")


@fault("the model's weights are others at the same path", "the command is refused")
def test_other_weights(own: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1e-3}, path, metadata={"format": "pt"})
    refused(own, "diffusion_pytorch_model.safetensors")


@fault("a file that the run reads is moved or written in another format", "the run goes on")
def test_moved_files(own: list[str], tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(tmp_path / "model", moved / "model")
    (tmp_path / "train.txt").unlink()
    rows = [json.dumps({"prompt": f'"{word}"', "target": word}) for word in WORDS]
    (moved / "train.jsonl").write_text("\n".join(rows))
    there = {
        "model.path": moved / "model",
        "data.train_files": moved / "train.jsonl",
    }
    ended = command(*own, *(f"{key}={path}" for key, path in there.items()))
    assert ended.code == 0, ended.output


@fault("a resumed command changes a setting that trains otherwise", "it is refused")
@pytest.mark.parametrize("setting", ["actor.optim.lr=1e-4", "trainer.seed=1", "rollout.n=4"])
def test_other_settings(own: list[str], setting: str) -> None:
    ended = command(*words_of(own[1:], setting))
    assert ended.code == 2, ended.output
    assert setting.partition("=")[0] in ended.output
    assert "accept_changed_inputs" not in ended.output


@fault("rows of metrics.jsonl are gone", "the run goes on and says which")
def test_missing_rows(own: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(row for row in rows if '"step": 1,' not in row and '"step": 1}' not in row)
    )
    ended = command(*own)
    assert ended.code == 0, ended.output
    assert "lacks the rows of 1 steps, from 1" in ended.output


@fault("config.yaml is damaged", "one line names the file")
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff", b"model: [", b"a: &a [1]\nb: *a\n", b"- 1\n", b"model: {path: 3, x: 1}\n"],
    ids=["empty", "bytes", "torn", "alias", "list", "keys"],
)
@pytest.mark.parametrize("verb", ["train", "eval", "report"])
def test_damaged_config(own: list[str], tmp_path: Path, verb: str, content: bytes) -> None:
    run = tmp_path / "run"
    (run / "config.yaml").write_bytes(content)
    ended = command(*own) if verb == "train" else command(verb, str(run))
    if verb == "report" and content.startswith(b"model: {"):
        assert ended.code == 0  # a page of a run of another version
        return
    assert ended.code == 2, ended.output
    assert "Traceback" not in ended.output
    assert "config.yaml" in ended.output

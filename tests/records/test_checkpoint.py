"""A checkpoint is whole or not there, and a damaged one is refused."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from flowgrpo_rc.records.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)


def make(step: int) -> Checkpoint:
    weights, count = torch.arange(6.0).reshape(2, 3) + step, torch.tensor(float(step))
    tensors = {"lora": {"a": weights}, "optimizer": {"a.step": count}}
    return Checkpoint(step=step, tensors=tensors, state={"update": {"updates": step}, "ratio": 0.1})


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2", "step_10"]
    loaded = load_checkpoint(tmp_path / "step_10")
    assert loaded.step == 10
    assert loaded.state == {"update": {"updates": 10}, "ratio": 0.1}
    for stem, tensors in make(10).tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded.tensors[stem][name], tensor)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    "name", ["lora.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, make(3), keep=1) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="step_3") as error:
        load_checkpoint(tmp_path / "step_3")
    if (
        damage != "flip" or name != "manifest.json"
    ):  # a flipped manifest accuses the file whose digest it holds
        assert name in str(error.value)
    assert "delete" in str(error.value)


def test_a_partial_checkpoint_does_not_count(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    leftover = tmp_path / ".partial_step_2"
    leftover.mkdir()
    (leftover / "lora.safetensors").write_bytes(b"torn")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    save_checkpoint(tmp_path, make(2), keep=2)
    assert load_checkpoint(tmp_path / "step_2").step == 2
    assert not leftover.exists()


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit of the file size stands for the full disk: the write fails half-way with an
    OSError.
    """
    program = """
        import resource, signal, sys, torch
        from pathlib import Path
        from flowgrpo_rc.records.checkpoint import *

        def save(step, size):
            tensors = {"lora": {"a": torch.zeros(size)}}
            checkpoint = Checkpoint(step=step, tensors=tensors, state={})
            save_checkpoint(Path(sys.argv[1]), checkpoint, keep=2)

        save(1, 4)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            save(2, 9999)
        except CheckpointError as error:
            print(error)
    """
    assert hasattr(resource, "RLIMIT_FSIZE")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step_2" in done.stdout
    assert "free some space" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert load_checkpoint(tmp_path / "step_1").step == 1

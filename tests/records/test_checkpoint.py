"""A checkpoint is whole or not there, and a damaged one is refused."""

from __future__ import annotations

import resource
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
    weights = torch.arange(6.0).reshape(2, 3) + step
    count = torch.tensor(float(step))
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
    # A flipped manifest accuses the file whose digest it holds.
    assert name in str(error.value) or (damage, name) == ("flip", "manifest.json")


def test_a_partial_checkpoint_does_not_count(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    leftover = tmp_path / ".partial_step_2"
    leftover.mkdir()
    (leftover / "lora.safetensors").write_bytes(b"torn")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    save_checkpoint(tmp_path, make(2), keep=2)
    assert load_checkpoint(tmp_path / "step_2").step == 2
    assert not leftover.exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    checkpoint = make(1)
    checkpoint.tensors["lora"]["a"][0, 1] = torch.nan
    with pytest.raises(CheckpointError, match="step 1 is not saved: 1 tensors are not finite"):
        save_checkpoint(tmp_path, checkpoint, keep=1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit of the file size stands for the full disk: the write fails half-way."""
    save_checkpoint(tmp_path, make(1), keep=2)
    large = make(2)
    large.tensors["lora"]["a"] = torch.zeros(9999)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step_2.*free some space"):
            save_checkpoint(tmp_path, large, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert load_checkpoint(tmp_path / "step_1").step == 1

"""Checkpoints that are complete or absent.

A checkpoint is written to a temporary folder, synced to the disk, listed in a manifest of SHA-256
sums, and renamed; then older ones are deleted. safetensors rejects a truncated file but loads
flipped bits without complaint; the manifest finds both. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

_MANIFEST = "manifest.json"
_STATE = "state.json"
OLDER = "lora_step_"  # stem of the LoRA of an earlier step
OF_PROCESS = "earlier_batches_process_"  # how files that belong to a single process start
STAGING = ".staging"  # where processes leave them for the next checkpoint, beside the checkpoints
_NAME = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or cannot be written; the message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a run after a step.

    Attributes:
      step: the last step that is in it.
      tensors: stem of a file (`lora`, `optimizer`, `ema`, ...) -> name -> tensor.
      state: further values, which JSON can hold.
      files: those of single processes, whose names start with `OF_PROCESS`. They are moved into the
        checkpoint that is saved. Of one that is loaded, each process reads its own.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    files: Sequence[Path] = ()

    def older_weights(self) -> dict[int, Mapping[str, Tensor]]:
        """Returns the LoRAs of earlier steps that rollouts still to come need, by step."""
        stems = [stem for stem in self.tensors if stem.startswith(OLDER)]
        return {int(stem.removeprefix(OLDER)): self.tensors[stem] for stem in stems}


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes `folder/step_N` and deletes all but the newest `keep` checkpoints.

    A failure leaves every older checkpoint as it was, and no incomplete one.

    Args:
      folder: the folder of all checkpoints.
      checkpoint: what to write.
      keep: how many checkpoints to keep, this one included.

    Raises:
      CheckpointError: the disk refuses.
    """
    final = folder / f"step_{checkpoint.step}"
    partial = folder / f".partial_{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for stem, tensors in checkpoint.tensors.items():
            contiguous = {
                name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
            }
            save_file(contiguous, partial / f"{stem}.safetensors")
        for path in checkpoint.files:
            path.replace(partial / path.name)
        _write_json(partial / _STATE, {"step": checkpoint.step, **checkpoint.state})
        _write_json(
            partial / _MANIFEST, {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        )
        for path in [*partial.iterdir(), partial]:
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _fsync(folder)
        shutil.rmtree(folder / STAGING, ignore_errors=True)
    # Every exception, since safetensors has a type of its own for a full disk.
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(final, error) from error
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def cannot_write(path: Path, error: Exception) -> CheckpointError:
    """Returns the error about a checkpoint, or a part of one, that the disk refuses."""
    return CheckpointError(
        f"cannot write the checkpoint {path}: {error}. Older checkpoints are untouched; free some "
        "space or choose another trainer.output_dir, then run the same command to go on"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after it has checked every file against the manifest.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    remedy = f"delete {path} to go on from the checkpoint before it"
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / _MANIFEST} is missing or damaged ({error}); {remedy}"
        ) from error
    for name, digest in manifest.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {remedy}")
        if _sha256(file) != digest:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is not the one in {_MANIFEST}; {remedy}"
            )
    state = json.loads((path / _STATE).read_text())
    files = [path / name for name in manifest if name.startswith(OF_PROCESS)]
    stems = [Path(name).stem for name in manifest if name.endswith(".safetensors")]
    tensors = {
        stem: load_file(path / f"{stem}.safetensors")
        for stem in stems
        if not stem.startswith(OF_PROCESS)
    }
    return Checkpoint(step=state.pop("step"), tensors=tensors, state=state, files=files)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

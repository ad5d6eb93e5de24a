"""Checkpoints that are complete or absent.

A checkpoint is written to a temporary folder, synced to the disk, listed in a manifest of SHA-256
sums, and renamed; then older ones are deleted. safetensors rejects a truncated file but loads
flipped bits without complaint; the manifest finds both. Nothing is pickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import get_total_norm

from flowgrpo_rc.reading import read_mapping

PARTIAL = ".partial_"  # how the folder of a checkpoint that is not complete starts
_MANIFEST = "manifest.json"
_STATE = "state.json"
OLDER = "lora_step_"  # stem of the LoRA of an earlier step
_NAME = re.compile(r"step_(\d+)")
_PLAIN = re.compile(r"\w[\w.-]*")  # name of a file in the checkpoint's own folder
_FINITE = ("lora", "optimizer", "ema")  # how stems start whose tensors are finite


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or cannot be written; the message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a run after a step."""

    step: int  # the last that is in it
    tensors: Mapping[str, Mapping[str, Tensor]]  # by stem of a file (`lora`, `ema`) and name
    state: Mapping[str, Any]  # further values, which JSON can hold

    def older_weights(self) -> dict[int, Mapping[str, Tensor]]:
        """Returns the LoRAs of earlier steps that rollouts still to come need, by step."""
        stems = [stem for stem in self.tensors if stem.startswith(OLDER)]
        return {int(stem.removeprefix(OLDER)): self.tensors[stem] for stem in stems}


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, *, keep: int, spare: int | None = None
) -> Path:
    """Writes `folder/step_N` and deletes all but the newest `keep` checkpoints, this one included.

    That of the step `spare` stays, too.

    Raises CheckpointError if the disk refuses, or weights, moments or averages are not finite.
    Every older checkpoint then stays as it was, and there is no incomplete one.
    """
    final = folder / f"step_{checkpoint.step}"
    if broken := _broken(checkpoint.tensors):
        raise CheckpointError(f"step {checkpoint.step} is not saved: {broken}")
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for stem, tensors in checkpoint.tensors.items():
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(plain, partial / f"{stem}.safetensors")
        _write_json(partial / _STATE, {"step": checkpoint.step, **checkpoint.state})
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        _write_json(partial / _MANIFEST, sums)
        # The rename may reach the disk before the files do, so these are synced first.
        for path in [*partial.iterdir(), partial]:
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _fsync(folder)
    # Every exception, since safetensors has a type of its own for a full disk.
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint {final}: {error}. Older checkpoints are untouched; free "
            "some space or choose another trainer.output_dir, then run the same command to go on"
        ) from error
    for old in list_checkpoints(folder)[:-keep]:
        if _step_of(old) != spare:
            shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=_step_of)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints of later steps, which were found damaged; returns their new paths."""
    moved = []
    for path in list_checkpoints(folder):
        if _step_of(path) > step:
            free = (folder / f"damaged_{path.name}_{number}" for number in count(1))
            moved.append(path.rename(next(target for target in free if not target.exists())))
    return moved


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint; CheckpointError for a file that is not as the manifest says."""
    manifest = _read_json(path, _MANIFEST)
    for name, digest in manifest.items():
        damage = ""
        if not _PLAIN.fullmatch(name):
            damage = f"{_MANIFEST} names {name!r}, which is no file here"
        elif not (path / name).is_file():
            damage = f"{name} is missing"
        elif _sha256(path / name) != digest:
            damage = f"{name} is damaged: {_MANIFEST} has another SHA-256"
        if damage:
            raise CheckpointError(f"{path}: {damage}")
    state = _read_json(path, _STATE) if _STATE in manifest else {}
    if state.pop("step", None) != _step_of(path):
        raise CheckpointError(f"{path}: {_MANIFEST} lists no {_STATE}, or one of another step")
    stems = [Path(name).stem for name in manifest if name.endswith(".safetensors")]
    tensors = {stem: _tensors(path, stem) for stem in stems}
    return Checkpoint(step=_step_of(path), tensors=tensors, state=state)


def check_tensors(
    stem: str, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Returns tensors of a checkpoint; CheckpointError for another name, shape or dtype."""
    forms = {name: _form(tensor) for name, tensor in stored.items()}
    needed = {name: _form(tensor) for name, tensor in expected.items()}
    different = sorted(name for name, _ in forms.items() ^ needed.items())
    if different:
        name = different[0]
        raise CheckpointError(
            f"{stem}.safetensors of the checkpoint has other tensors than this run: {name} is "
            f"{forms.get(name, 'missing')}, this run needs {needed.get(name, 'none')}; "
            f"{len(set(different))} differ"
        )
    return stored


def not_finite(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Returns the tensors with a number that is not finite; one transfer if there is none."""
    named = {
        f"{stem}/{name}": tensor
        for stem, group in tensors.items()
        for name, tensor in group.items()
        if tensor.is_floating_point()
    }
    # An optimizer counts its updates on the host. One norm would send each count to the device.
    devices = {tensor.device for tensor in named.values()}
    groups = (
        [tensor for tensor in named.values() if tensor.device == device] for device in devices
    )
    # A norm is finite if all of its numbers are, and none is beyond 1e19.
    if all(get_total_norm(group).isfinite() for group in groups):
        return []
    return [name for name, tensor in named.items() if not tensor.isfinite().all()]


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        return read_mapping(path / name)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} is missing or damaged ({error})") from error


def _tensors(path: Path, stem: str) -> dict[str, Tensor]:
    try:
        tensors = load_file(path / f"{stem}.safetensors")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {stem}.safetensors is damaged: {error}") from error
    if broken := _broken({stem: tensors}):
        raise CheckpointError(f"{path}: {broken}")
    return tensors


def _broken(tensors: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Returns what is wrong with weights, moments and averages, which have to be finite."""
    broken = not_finite({s: group for s, group in tensors.items() if s.startswith(_FINITE)})
    return f"{len(broken)} tensors are not finite, the first is {broken[0]}" if broken else ""


def _write_json(path: Path, value: Mapping[str, object]) -> None:
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

"""A checkpoint that is damaged, or was made to harm, is refused, and the one before is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.faults import Trained, command, fault, mixed, replace_file, words_of
from support.runs import final_state

FILES = (
    "lora.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
    "state.json",
    "manifest.json",
)
DAMAGE: Mapping[str, Callable[[Path], Any]] = {
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@fault(
    "a file of the newest checkpoint is damaged",
    "the run goes on from the one before, ends with equal results, and keeps the damaged one aside",
)
@pytest.mark.parametrize(("name", "damage"), mixed(FILES, DAMAGE))
def test_damaged_file(
    finished: Path, whole: Trained, small: list[str], name: str, damage: str
) -> None:
    newest = finished / "checkpoints" / "step_3"
    DAMAGE[damage](newest / name)
    command(*words_of(small)).expect(0, "damaged checkpoint was passed over")
    assert (finished / "checkpoints" / "damaged_step_3_1").is_dir()
    assert final_state(finished) == whole.state
    assert "damaged checkpoint was passed over" in (finished / "report.html").read_text()


@fault("all checkpoints are damaged", "the command is refused and nothing is deleted")
def test_all_damaged(finished: Path, small: list[str]) -> None:
    checkpoints = sorted((finished / "checkpoints").iterdir())
    for path in checkpoints:
        (path / "lora.safetensors").write_bytes(b"")
    command(*words_of(small)).expect(1, "step_3: lora.safetensors is damaged")
    assert sorted((finished / "checkpoints").iterdir()) == checkpoints


# --- Crafted: each file fits its manifest


Tensors = dict[str, torch.Tensor]


def tensors(change: Callable[[Tensors, str], Tensors]) -> Callable[[Path], Any]:
    """Returns a change of a file of tensors, which is given the name of the first as well."""

    def changed(path: Path) -> None:
        found = load_file(path)
        save_file(change(found, next(iter(found))), path)

    return changed


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


LORA, STATE = "lora.safetensors", "state.json"
CRAFTED = {
    "a row to be broadcast": (LORA, tensors(lambda t, one: t | {one: t[one][:1].clone()})),
    "a tensor too many": ("ema.safetensors", tensors(lambda t, _: t | {"more": torch.zeros(1)})),
    "a moment of another shape": (
        "optimizer.safetensors",
        tensors(lambda t, _: {k: v[:1].clone() if v.ndim else v for k, v in t.items()}),
    ),
    "no tensors in the file": (LORA, lambda path: path.write_bytes(b"\x08" * 64)),
    "no state of the update": (STATE, state(lambda found: {"step": found["step"]})),
    "a text for a number": (
        STATE,
        state(lambda found: found | {"update": found["update"] | {"lr_schedule": "x"}}),
    ),
}


@fault("a checkpoint is crafted: its files fit its manifest", "one line names what is wrong")
@pytest.mark.parametrize("case", CRAFTED)
def test_crafted(begun: Path, small: list[str], case: str) -> None:
    name, change = CRAFTED[case]
    replace_file(begun / "checkpoints" / "step_1", name, change)
    error = command(*words_of(small)).expect(1).error()
    assert re.search("step_1|step 1|of the checkpoint", error)


@fault("a manifest names a file outside of its folder", "the checkpoint is refused")
@pytest.mark.parametrize("name", ["../step_2/lora.safetensors", "/etc/passwd"])
def test_crafted_manifest(finished: Path, small: list[str], name: str) -> None:
    for folder in (finished / "checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {name: "0" * 64}))
    command(*words_of(small)).expect(1, "which is no file here")


@fault("a killed process has left temporary files", "they are swept")
def test_stale_files(finished: Path, small: list[str]) -> None:
    stale = [
        finished / ".metrics.jsonl.tmp",
        finished / "samples" / ".step_000001.png.tmp",
        finished / "checkpoints" / ".partial_step_9" / "lora.safetensors",
        finished / ".something_else.tmp",
    ]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"torn")
    (finished / "checkpoints" / "step_3" / "lora.safetensors").write_bytes(b"")
    command(*words_of(small)).expect(0)
    assert [path for path in stale if path.exists()] == []
    assert not (finished / "checkpoints" / ".partial_step_9").exists()

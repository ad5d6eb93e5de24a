"""Folders of runs, models and LoRAs that are damaged, or were made to harm, cost one line."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from support.faults import Ended, command, fault, words_of

Change = Callable[[Path], Any]
DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
MEMORY = 12 * 2**30  # bytes of address space that a command may take


def bounded() -> None:
    """Lets a command fail that would take the memory of the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def told(ended: Ended, *words: str) -> None:
    """Checks that a command has failed with one line that has these words."""
    assert ended.code in (1, 2), ended.output
    assert "Traceback" not in ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) < 1000
    assert all(word in last for word in words), last


def text(content: str) -> Change:
    return lambda path: path.write_text(content)


def row(**values: object) -> Change:
    """Returns a change of the first row of a file with one JSON object a line."""

    def change(path: Path) -> None:
        first, *rest = path.read_text().splitlines()
        merged = json.dumps(json.loads(first) | values)
        path.write_text("\n".join([merged, *rest, ""]))

    return change


def setting(section: str, name: str, value: object) -> Change:
    """Returns a change of config.yaml."""

    def change(path: Path) -> None:
        config = yaml.safe_load(path.read_text())
        config[section] = value if not name else config[section] | {name: value}
        path.write_text(yaml.safe_dump(config))

    return change


def picture(tiles: dict[str, object] | None = None, size: tuple[int, int] = (99, 99)) -> Change:
    def change(path: Path) -> None:
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        if tiles is not None:
            info.add_itxt("flowgrpo_rc.tiles", json.dumps(tiles))
        Image.new("1", size).save(path, pnginfo=info)

    return change


LAST = "samples/step_000003.png"
# What is done to which file of a run, by the case.
RUNS: dict[str, tuple[str, Change]] = {
    "environment: deep": ("environment.json", text(DEEP)),
    "environment: packages": ("environment.json", text('{"packages": ["torch"]}')),
    "health: no message": ("health.jsonl", text('{"step": 1}\n')),
    "metrics: string": ("metrics.jsonl", row(**{"actor/pg_loss": "low"})),
    "metrics: 10^400": ("metrics.jsonl", row(**{"reward/mean": 10**400})),
    "metrics: step": ("metrics.jsonl", row(step=10**12)),
    "decided: deep": ("decided.json", text(DEEP)),
    "samples: pixels": (LAST, picture(size=(30000, 30000))),
    "samples: tiles": (LAST, picture({"size": [9000, 9000], "columns": 1, "captions": ["a 1"]})),
    "rejected: no reasons": ("rejected.jsonl", text('{"step": 1}\n')),
}


@fault("a file of a run that somebody gave away is damaged", "one line names the file")
@pytest.mark.parametrize("case", RUNS)
def test_a_damaged_run(finished: Path, case: str) -> None:
    name, change = RUNS[case]
    other = shutil.copytree(finished, finished.parent / "other")
    change(finished / name)
    told(command("report", str(finished), harm=bounded), str(finished), name)
    if name != "rejected.jsonl":
        out = str(finished.parent / "page.html")
        words = ["compare", str(other), str(finished), "--out", out]
        told(command(*words, harm=bounded), str(finished), name)


@fault("a run that somebody gave away has names and settings of a wrong form", "its page is made")
def test_what_a_report_leaves_out(finished: Path) -> None:
    setting("trainer", "", ["a list"])(finished / "config.yaml")
    shutil.copy(finished / LAST, finished / "samples" / "step_<x>.png")
    command("report", str(finished)).expect(0)


CHECKPOINT = "checkpoints/step_3/manifest.json"


@fault(
    "inputs, environment or manifest of a run are damaged", "train and export say so in one line"
)
@pytest.mark.parametrize("content", ["[]", DEEP], ids=["list", "deep"])
def test_damaged_inputs_and_manifests(finished: Path, small: list[str], content: str) -> None:
    (finished / CHECKPOINT).write_text(content)
    out = str(finished.parent / "lora")
    told(command("export", str(finished), "--out", out), "step_3", "manifest.json")
    command(*words_of(small)).expect(0, "damaged checkpoint was passed over")
    (finished / "inputs.json").write_text(content)
    told(command(*words_of(small)), str(finished / "inputs.json"))
    if content == "[]":
        (finished / "environment.json").write_text(content)
        told(command("export", str(finished), "--out", out), str(finished / "environment.json"))


def entry(**values: object) -> Change:
    """Returns a change of entries of a JSON file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


INDEX = "model_index.json"
MODELS: dict[str, tuple[str, Change, str]] = {
    "no library": (INDEX, entry(vae=[None, "X"]), "its vae is"),
    "a function": (INDEX, entry(vae=["transformers", "pipeline"]), "and this installation"),
    "deep": (INDEX, text(DEEP), INDEX),
    "deep settings": ("transformer/config.json", text(DEEP), "its transformer"),
    "layers": ("transformer/config.json", entry(num_layers=10**9), "transformer/config.json"),
    "encoder": (
        "text_encoder/config.json",
        entry(num_hidden_layers=10**9),
        "text_encoder/config.json",
    ),
}


@fault("a description in a model's folder is damaged, or was made to harm", "one line names it")
@pytest.mark.parametrize("case", MODELS)
def test_a_damaged_model(checkpoint: Path, small: list[str], tmp_path: Path, case: str) -> None:
    name, change, words = MODELS[case]
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    change(model / name)
    ended = command(*words_of(small, f"model.path={model}"), harm=bounded).expect(2)
    told(ended, f"model.path={model}", words)


def not_finite(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = torch.inf
    save_file(tensors, path)


def deep_metadata(path: Path) -> None:
    save_file(load_file(path), path, {"lora_adapter_metadata": DEEP})


LORAS: dict[str, tuple[Change, str]] = {
    "not finite": (not_finite, "lora_A.weight holds numbers that are not finite"),
    "deep": (deep_metadata, "nested deeper"),
}


@fault("a LoRA file to start from is damaged or not finite", "exit code 2; one line says why")
@pytest.mark.parametrize("case", LORAS)
def test_a_damaged_lora(finished: Path, small: list[str], tmp_path: Path, case: str) -> None:
    change, words = LORAS[case]
    file = finished / "lora" / "pytorch_lora_weights.safetensors"
    change(file)
    given = [f"model.lora_path={file}", f"trainer.output_dir={tmp_path / 'next'}"]
    ended = command(*words_of(small, *given)).expect(2)
    told(ended, f"model.lora_path={file}", words)

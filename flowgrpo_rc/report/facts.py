"""The lines at the head of a page: what a run decided, and where and when it ran."""

from datetime import datetime
from pathlib import Path

from flowgrpo_rc.reading import blaming
from flowgrpo_rc.records.metrics_file import Row
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.report import folder

_VERSIONS = ("flowgrpo-rc", "git", "torch", "diffusers", "transformers")
# Entries of words.yaml, by the names of decided facts that they explain.
_WORDS = {
    "Reward": "reward",
    "Log-ratio": "centered",
    "Mode": "mode",
    "Loss and clip": "clip",
    "Rejection": "rejection",
    "Weights": "weight",
    "Precision": "precision",
    "LoRA": "lora",
}


def facts(run_dir: Path) -> list[tuple[str, str, str]]:
    """Returns lines of word (a key of words.yaml, or empty), name and value.

    ValueError if decided.json or environment.json is damaged.
    """
    lines = folder.decided(run_dir)
    environment = folder.environment(run_dir)
    with blaming(RunFolder(run_dir).environment):
        lines |= _start(environment)
    return [(_WORDS.get(name, ""), name, value) for name, value in lines.items() if value]


def _start(environment: Row) -> dict[str, str]:
    started = environment.get("started")
    device = environment.get("device")
    processes = environment.get("processes")
    packages = (environment.get("packages") or {}) | {"git": environment.get("git")}
    versions = [f"{name} {packages[name]}" for name in _VERSIONS if packages.get(name)]
    count = f", {processes} process{'' if processes == 1 else 'es'}" if processes else ""
    return {
        "Started": f"{datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}" if started else "",
        "Ran on": f"{device}{count}" if device else "",
        "Versions": ", ".join(versions),
    }

"""The folder of a run, and whether a command may continue in it."""

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch
import yaml

from flowgrpo_rc.assets import with_references
from flowgrpo_rc.files import TEMPORARY, write_atomic
from flowgrpo_rc.records.checkpoint import PARTIAL
from flowgrpo_rc.records.inputs import Input, changed_inputs, same_content, write_inputs
from flowgrpo_rc.redaction import redact, redact_command

_PACKAGES = "flowgrpo-rc torch diffusers transformers peft accelerate rapidocr"
# Keys that may differ between two commands on one run: they change the result by rounding at most.
# The length of the run is checked by itself.
_FREE = """
    trainer.total_training_steps trainer.max_time trainer.deterministic trainer.logger
    trainer.save_freq trainer.resume_mode trainer.output_dir
    trainer.max_checkpoints_to_keep trainer.suites trainer.experiment_name trainer.project_name
    trainer.save_rollouts trainer.num_processes trainer.strategy trainer.timeout_s
    trainer.sample_freq trainer.patience trainer.export_freq trainer.push_to_hub
    model.decode_batch_size model.prompt_cache data.allow_overlap
    actor.ppo_micro_batch_size_per_gpu actor.steps_per_forward
    rollout.micro_batch_size_per_gpu rollout.merge_lora rollout.workers rollout.cpus_per_worker
    rollout.gpus_per_worker rollout.ray_address rollout.worker_timeout_s rollout.max_restarts
    reward.timeout_s
"""


class RunFolder:
    """The paths of a run.

    They are config.yaml, decided.json, environment.json, inputs.json, metrics.jsonl, health.jsonl,
    rejected.jsonl, samples/, checkpoints/, lora/, lora_best/, rollouts/ if asked for, suites/ after
    an evaluation by suites, and debug/ after an update that failed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.decided = root / "decided.json"
        self.environment = root / "environment.json"
        self.inputs = root / "inputs.json"
        self.metrics = root / "metrics.jsonl"
        self.health = root / "health.jsonl"
        self.samples = root / "samples"
        self.rejected = root / "rejected.jsonl"
        self.checkpoints = root / "checkpoints"
        self.lora = root / "lora"
        self.lora_best = root / "lora_best"
        self.rollouts = root / "rollouts"
        self.suites = root / "suites"
        self.debug = root / "debug"

    def samples_stem(self, step: int, *, evaluated: bool = True) -> Path:
        """Returns the path of a step's held-out samples, without its ending."""
        return self.samples / f"{'step' if evaluated else 'drawn'}_{step:06d}"

    def drop_rollouts_after(self, step: int) -> None:
        """Deletes saved rollouts of steps that a resumed run samples again."""
        for path in self.rollouts.glob("step_*.safetensors"):
            if int(path.stem.split("_")[1]) > step:
                path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder until the process ends; ValueError if another run holds it."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with os.fdopen(lock) as file:
            self._lock(file, fcntl.LOCK_EX)
            yield

    def check_free(self) -> None:
        """Raises ValueError if a run that is still going on holds the folder."""
        lock = self.root / ".lock"
        if lock.is_file():
            # A shared lock: several processes of one run may look at the same time.
            with lock.open() as file:
                self._lock(file, fcntl.LOCK_SH)

    def _lock(self, file: TextIO, kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"trainer.output_dir={self.root} is in use by a run that is still going on"
            ) from error

    def create(
        self,
        config: Mapping[str, object],
        device: torch.device,
        processes: int,
        inputs: Mapping[str, Input],
        facts: Mapping[str, str] | None = None,
        suites: Mapping[str, str] | None = None,
    ) -> None:
        """Writes config.yaml, inputs.json, decided.json with the facts, and environment.json.

        Facts are what was decided, by name, and `suites` protocols of suites.
        """
        self.write_settings(config)
        write_inputs(self.inputs, inputs)
        write_atomic(self.decided, json.dumps(redact(facts or {}), indent=1).encode())
        # `python -m` gives the path of a file of this package; a script of the user's has its name.
        program = Path(sys.argv[0])
        modules = {"train.py": ["flowgrpo-rc", "train"], "__main__.py": ["flowgrpo-rc"]}
        is_ours = program.parent.name == "flowgrpo_rc" and program.name in modules
        typed = modules[program.name] if is_ours else [program.name]
        environment: dict[str, object] = {
            "command": redact_command([*typed, *sys.argv[1:]]),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": processes,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in _PACKAGES.split()},
            "started": datetime.now().astimezone().isoformat(timespec="minutes"),
        }
        if suites:
            environment["suites"] = dict(suites)
        if (commit := _commit()) is not None:
            environment["git"] = commit
        write_atomic(self.environment, json.dumps(environment, indent=1).encode())

    def write_settings(self, config: Mapping[str, object]) -> None:
        """Writes config.yaml without secrets."""
        # Paths of bundled files become `${asset:NAME}`, so that the folder can be used elsewhere.
        portable = with_references(redact(config))
        write_atomic(self.config, yaml.safe_dump(portable, sort_keys=False).encode())

    def check_same_run(
        self,
        stored: Mapping[str, object],
        config: Mapping[str, object],
        inputs: Mapping[str, Input],
    ) -> None:
        """Raises ValueError unless `config` trains what `stored` has, for however many steps.

        Another path is the same setting if its content is the same.
        """
        free = tuple(_FREE.split())
        stored_settings = flat_settings(with_references(redact(stored)))
        new_settings = flat_settings(with_references(redact(config)))
        settings = [
            f"{key}: {stored_settings.get(key)!r} there, {new_settings.get(key)!r} now"
            for key in sorted(stored_settings.keys() | new_settings.keys())
            if stored_settings.get(key) != new_settings.get(key)
            and not key.startswith(free)
            and not same_content(self.inputs, key, inputs)
        ]
        self.check_same_inputs(inputs, settings)

    def check_same_inputs(
        self, inputs: Mapping[str, Input], other_settings: Sequence[str] = ()
    ) -> None:
        """Raises ValueError if the content of an input has changed since the run began."""
        changed = [*other_settings, *changed_inputs(self.inputs, inputs)]
        if changed:
            kind = "settings" if other_settings else "inputs"
            raise ValueError(
                f"{self.root} holds a run with other {kind} ({'; '.join(changed[:5])}). Another "
                "trainer.output_dir starts a fresh run; so does this one once that folder is "
                "deleted"
            )

    def sweep(self) -> None:
        """Deletes temporary files that a killed process has left; call it under the lock."""
        for path in self.root.rglob(".*"):
            if path.name.endswith(TEMPORARY) and (path.is_file() or path.is_symlink()):
                path.unlink()
        for path in chain(self.checkpoints.glob(f"{PARTIAL}*"), self.lora.glob(f"{PARTIAL}*")):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)


def check_writable(root: Path, *, needed_bytes: int, key: str = "trainer.output_dir") -> None:
    """Raises ValueError, before anything is loaded, if nothing can be written to `root`."""
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    problem = ""
    if free < needed_bytes:
        needed = f"{needed_bytes / 2**20:.0f} MiB"
        problem = f"{free / 2**20:.0f} MiB free, a run needs at least {needed}"
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise ValueError(
            f"{key}={root} cannot be written: {problem}; give another folder, or free some space"
        )


def flat_settings(tree: object, prefix: str = "") -> dict[str, object]:
    """Returns the leaves of a tree of mappings, by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict[str, object] = {}
    for name, value in tree.items():
        flat |= flat_settings(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Returns the commit of the package's own checkout; None without one, as from a wheel."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    # Excluding all tags leaves the hash alone.
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(describe, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None

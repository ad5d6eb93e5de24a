"""Trajectories on disk: what one run sampled, another can train on (`data.replay_dir`).

A file holds one process's samples of one step: the batch as it was sampled, with the log-probs of
the sampling policy, and its rewards. The format is safetensors, with kind, spec and origin in the
header.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from flowgrpo_rc.batch import Batch, Rewards, Spec
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import blaming, parse_mapping
from flowgrpo_rc.records.packed_batch import PackedBatch, pack, unpack

_REWARD = "reward."
_PART = f"{_REWARD}parts/"
_HEADER = "rollout"  # a single entry: safetensors writes several in no fixed order
_FILES = "step_*_process_*_of_*.safetensors"


class SavedRollout(NamedTuple):
    """One process's samples of one step; a reader has to agree with the origin (`Task.origin`)."""

    batch: Batch
    rewards: Rewards
    origin: Mapping[str, object]


def rollout_path(folder: Path, step: int, rank: int, count: int) -> Path:
    """Returns the file of one process's samples of one step."""
    return folder / f"step_{step:06d}_process_{rank}_of_{count}.safetensors"


def save_rollout(path: Path, rollout: SavedRollout) -> None:
    """Writes a rollout, whole or not at all."""
    packed = pack(rollout.batch)
    rewards = rollout.rewards
    tensors = {**packed.tensors, f"{_REWARD}total": rewards.total, f"{_REWARD}valid": rewards.valid}
    tensors |= {f"{_PART}{name}": values for name, values in rewards.parts.items()}
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {**packed.header, "origin": dict(rollout.origin)}
    write_atomic(path, save(content, metadata={_HEADER: json.dumps(header, sort_keys=True)}))


def read_header(path: Path) -> dict[str, Any]:
    """Returns kind, spec and origin of a saved rollout; ValueError if the file is damaged."""
    with blaming(f"data.replay_dir: {path}"), safe_open(path, framework="pt") as file:
        return parse_mapping((file.metadata() or {})[_HEADER])


def keeps_means(folder: Path) -> bool:
    """Returns whether the first rollout of a run's folder, or its rollouts/, holds means of steps.

    False if there is none, or if it is damaged.
    """
    files = sorted(_inside(folder).glob(_FILES))
    try:
        with safe_open(files[0], framework="pt") as file:
            return "prev_sample_mean" in file.keys()  # noqa: SIM118, the file is no mapping
    except (IndexError, SafetensorError):
        return False


def load_rollout(path: Path, device: torch.device) -> SavedRollout:
    """Reads a rollout back, bit for bit. ValueError if the file is damaged or something else."""
    header = read_header(path)
    with blaming(f"data.replay_dir: {path}"):
        tensors = load_file(path)
        total, valid = (tensors.pop(f"{_REWARD}{name}") for name in ("total", "valid"))
        names = [name for name in tensors if name.startswith(_PART)]
        columns = {name.removeprefix(_PART): tensors.pop(name) for name in names}
        batch = unpack(PackedBatch(header, tensors), device)
        return SavedRollout(
            batch, Rewards(total=total, valid=valid, parts=columns), header["origin"]
        )


def replay_files(folder: Path, rank: int, count: int) -> list[Path]:
    """Returns the saved steps of a process, in order; all processes must have all of them."""
    folder = _inside(folder)
    names = {path.name for path in folder.glob(_FILES)}
    steps = range(1, max((int(name.split("_")[1]) for name in names), default=1) + 1)
    expected = {rollout_path(folder, step, r, count).name for step in steps for r in range(count)}
    if names != expected:
        first = min(names ^ expected)
        raise ValueError(
            f"data.replay_dir={folder} must hold steps 1 to {steps[-1]} of {count} process(es), as "
            f"many as train now (see trainer.save_rollouts), and nothing else; {first} is "
            f"{'missing' if first in expected else 'of another number of processes'}"
        )
    return [rollout_path(folder, step, rank, count) for step in steps]


def recorded_processes(folder: Path) -> int:
    """Returns how many processes saved the rollouts of a folder; 1 if there are none."""
    names = [path.stem for path in folder.glob(f"**/{_FILES}")]
    return int(names[0].rpartition("_")[2]) if names else 1


def _inside(folder: Path) -> Path:
    """Returns the folder of rollouts, given that or the folder of its run."""
    inside = folder / "rollouts"
    return inside if inside.is_dir() else folder


def check_headers(paths: Sequence[Path], spec: Spec, origin: Mapping[str, object]) -> None:
    """Raises ValueError for a file that was sampled with other settings, their precision aside.

    What is not known of the origin may be left out. Tensors are not read.
    """
    expected = json.loads(json.dumps(dataclasses.asdict(spec) | dict(origin)))
    for path in paths:
        header = read_header(path)
        precision = {"dtype": spec.dtype, "tf32": spec.tf32}
        # JSON has lists for tuples.
        saved = json.loads(json.dumps(header["spec"] | header["origin"] | precision))
        different = [
            f"{key}: {saved.get(key)!r} there, {expected.get(key)!r} here"
            for key in expected.keys() | header["spec"].keys()
            if saved.get(key) != expected.get(key)
        ]
        if different:
            raise ValueError(
                f"data.replay_dir: {path} was sampled with other settings ({'; '.join(different)})"
            )


def check_contents(
    path: Path,
    batch: Batch,
    rewards: Rewards,
    *,
    samples: int,
    group_size: int,
    terms: Collection[str],
) -> None:
    """Raises ValueError if a saved rollout lacks samples, or a reward that is needed by itself."""
    lacking = sorted(set(terms) - set(rewards.parts))
    sizes = set(batch.group.unique(return_counts=True)[1].tolist())
    problem = ""
    if lacking:
        problem = (
            f"no reward {lacking[0]!r}, and algorithm.adv_estimator=gdpo needs each of "
            f"reward.terms; it has {', '.join(rewards.parts)}"
        )
    elif len(batch) != samples or sizes != {group_size}:
        problem = (
            f"{len(batch)} samples in groups of {sorted(sizes)}; data.train_batch_size and "
            f"rollout.n ask for {samples} in groups of {group_size}"
        )
    if problem:
        raise ValueError(f"data.replay_dir: {path} has {problem}")

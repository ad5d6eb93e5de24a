"""Steps of any trainer in safetensors files, of which no more is read than is looked at.

Legend: B samples, T steps of each, N = B T steps in all, S steps of the schedule, D elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from flowgrpo_rc.core.transition import KINDS
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping

MOST_SAMPLES = 256  # that are looked at
MOST_ELEMENTS = 2**26  # of their latents
MOST_NUMBERS = 2**24  # of any other tensor
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")
TABLES = ("rollout_log_probs", "old_log_probs", "new_log_probs", "timesteps", "step_indices")
# What the code of each trainer calls a tensor. The first name tells whose dump it is.
TRAINERS: Mapping[str, Mapping[str, str]] = {
    "flow_grpo": {"next_latents": "next_latents", "log_probs": "rollout_log_probs"},
    "UniRL": {"sde_logp": "rollout_log_probs", "sde_indices": "step_indices", "sde_means": "means"},
    "flowgrpo_rc": {"prompt_index": "prompt_index", "prev_sample_mean": "means"},
    "verl-omni": {"all_latents": "latents", "old_prev_sample_mean": "means"},
}
COMMON = {"all_latents": "latents", "all_timesteps": "timesteps"}
SETTINGS = {"eta": "noise_level", "clip_range": "clip_ratio"}


class Dump(NamedTuple):
    """What is looked at; None where it was not dumped."""

    trainer: str  # a key of `TRAINERS`, or `unknown`
    settings: Mapping[str, Any]  # sde_type, noise_level; clip_ratio, guidance_scale if told
    steps: int  # T
    start: Tensor  # states before the steps, fp32 [N, D]
    end: Tensor  # states behind the steps, [N, D]
    means: Tensor | None  # that `end` was drawn about, [N, D]
    tables: Mapping[str, Tensor]  # those of `TABLES` that there are, float64 [N]
    sigmas: Tensor  # the schedule, float64 [S+1]; nan where it is unknown
    place: Tensor  # of each step in the schedule, int64 [N]
    advantages: Tensor | None  # of every sample, float64
    group: Tensor | None  # of every sample


class _File:
    """A file whose tensors have their documented names."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path, self.handle = path, handle
        keys = list(handle.keys())
        self.trainer = next((name for name, own in TRAINERS.items() if next(iter(own)) in keys), "")
        known = COMMON | dict(TRAINERS.get(self.trainer, {}))
        self.names = {known.get(key, key): key for key in keys}

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor that must be there."""
        if name not in self.names:
            there = ", ".join(sorted(self.names)) or "nothing"
            raise ValueError(f"{self.path} has no tensor {name!r}; it holds {there}")
        return list(self.handle.get_slice(self.names[name]).get_shape())

    def read(self, name: str, rows: int | None = None) -> Tensor | None:
        """Reads the first rows of a tensor, or all of a small one; None if there is none."""
        if name not in self.names:
            return None
        if rows is None and math.prod(self.shape(name)) > MOST_NUMBERS:
            raise ValueError(f"{self.path}: {name} is too large: {self.shape(name)}")
        found: Tensor = self.handle.get_slice(self.names[name])[:rows]
        broken = (~torch.isfinite(found)).nonzero().tolist()
        if broken:
            raise ValueError(
                f"{self.path}: {len(broken)} numbers of {name} are nan or inf, the first at "
                f"{broken[0]}: find their cause first"
            )
        return found


def read_dump(path: Path) -> Dump:
    """Reads a .safetensors file or a folder of them; ValueError for anything else."""
    there = sorted(path.iterdir()) if path.is_dir() else [path]
    paths = [one for one in there if one.suffix == ".safetensors" and one.exists()]
    pickles = [one for one in there if one.suffix in PICKLES]
    if pickles and not paths:
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code when it is read: save the tensors with "
            "safetensors.torch.save_file, as docs/diagnose.md shows for each trainer"
        )
    if not paths:
        raise ValueError(f"{path}: give a .safetensors file, or a folder of them")
    with ExitStack() as stack:
        files = []
        for one in paths:
            with blaming(one):
                files.append(_File(one, stack.enter_context(safe_open(one, framework="pt"))))
        beside = there if path.is_dir() else [path.with_suffix(".json")]
        return _dump(files, [one for one in beside if one.suffix == ".json" and one.exists()])


def _settings(file: _File, beside: list[Path]) -> dict[str, Any]:
    """Reads numbers and words from a file's metadata and from small JSON files beside it."""
    found: dict[str, Any] = dict(file.handle.metadata() or {})
    if "rollout" in found:  # of this package
        with blaming(file.path):
            found |= parse_mapping(found["rollout"])["spec"]
    for one in beside:
        found |= read_mapping(one)
    found |= {known: found[name] for name, known in SETTINGS.items() if name in found}
    for name in ("noise_level", "clip_ratio", "guidance_scale"):
        with blaming(f"{file.path}: {name}={found.get(name)!r}"):
            if name in found and not 0 < (number := float(found[name])) < math.inf:
                raise ValueError("it has to be above 0")
            found |= {name: number} if name in found else {}
    if "noise_level" not in found or found.get("sde_type") not in KINDS:
        raise ValueError(
            f"{file.path} needs noise_level and sde_type ({', '.join(KINDS)}), in its metadata or "
            f"in a JSON beside it; it has {found.get('noise_level')} and {found.get('sde_type')}"
        )
    return found


def _dump(files: list[_File], beside: list[Path]) -> Dump:
    """Reads the latents of the first file, and all of what is small."""
    file = files[0]
    (rows, steps, *_), shape = [*file.shape(TABLES[0]), 0], file.shape("latents")
    kept, own = file.read("indices"), file.read("step_indices")  # UniRL keeps some states alone
    at = list(range(shape[1])) if kept is None else kept.tolist()
    starts = list(range(steps)) if kept is None or own is None else own.tolist()
    ends = starts if "next_latents" in file.names else [start + 1 for start in starts]
    size = math.prod(shape[1:])
    if len(shape) < 3 or not {*starts, *ends} <= {*at} or shape[0] != rows or not steps:
        raise ValueError(
            f"{file.path}: latents {shape} do not fit rollout_log_probs {file.shape(TABLES[0])}: "
            "give latents [B, T+1, ...] and the log-probs [B, T] of their steps"
        )
    samples = min(rows, MOST_SAMPLES, MOST_ELEMENTS // max(size, 1))
    if not samples:
        raise ValueError(f"{file.path}: one sample has {size} numbers: dump fewer steps")

    def states(name: str, places: list[int]) -> Tensor | None:
        found = file.read(name, samples)
        if found is None:
            return None
        if list(found.shape[2:]) != shape[2:] or found.shape[1] <= max(places):
            raise ValueError(f"{file.path}: {name} {list(found.shape)} do not fit latents {shape}")
        return found[:, places].float().flatten(2).flatten(0, 1)

    def column(name: str) -> Tensor | None:
        found = file.read(name)
        if found is None:
            return None
        if found.shape not in ((rows, steps), (rows, 1), (steps,)):
            raise ValueError(f"{file.path}: {name} {list(found.shape)} is not [{rows}, {steps}]")
        return found.double().expand(rows, steps)[:samples].flatten()

    def joined(name: str) -> Tensor | None:
        parts = [part for one in files if (part := one.read(name)) is not None]
        return torch.cat(parts) if parts else None

    begins = [at.index(place) for place in starts]
    start = states("latents", begins)
    behind = [at.index(place) for place in ends]
    end = states("next_latents" if "next_latents" in file.names else "latents", behind)
    assert start is not None and end is not None
    tables = {name: found for name in TABLES if (found := column(name)) is not None}
    sigmas, place = _schedule(file, tables, steps)
    settings = _settings(file, beside)
    return Dump(
        trainer=settings.get("trainer") or file.trainer or "unknown",
        settings=settings,
        steps=steps,
        start=start,
        end=end,
        means=states("means", list(range(steps))),
        tables=tables,
        sigmas=sigmas,
        place=place,
        advantages=joined("advantages"),
        group=joined("group"),
    )


def _schedule(file: _File, tables: Mapping[str, Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Returns the noise levels and where each step is in them."""
    sigmas, timesteps = file.read("sigmas"), tables.get("timesteps")
    if sigmas is None:
        if timesteps is None:
            raise ValueError(f"{file.path} has neither sigmas nor timesteps: dump one of them")
        given = timesteps.unique().flip(0)
        # Where the last step ends is not known.
        sigmas = torch.cat([given / 1000, given.new_tensor([math.nan])])
        return sigmas, (timesteps.unsqueeze(1) == given).nonzero()[:, 1]
    sigmas = sigmas.double().flatten()
    if not (sigmas.diff() < 0).all() or not 0 <= sigmas[-1] < sigmas[0] <= 1:
        raise ValueError(f"{file.path}: sigmas have to fall, from at most 1 to at least 0")
    place = torch.arange(len(tables[TABLES[0]])) % steps
    if "step_indices" in tables:
        place = tables["step_indices"].long()
    elif len(sigmas) != steps + 1 and timesteps is not None:
        least, place = (timesteps.unsqueeze(1) / 1000 - sigmas[:-1]).abs().min(1)
        if least.max() > 2e-3:  # of another schedule, so the nearest window has to do
            windows = sigmas[:-1].unfold(0, steps, 1)
            off = (timesteps.view(-1, 1, steps) / 1000 - windows).abs().sum(2).argmin(1)
            place = (off.unsqueeze(1) + torch.arange(steps)).flatten()
    if not 0 <= int(place.min()) <= int(place.max()) < len(sigmas) - 1:
        raise ValueError(f"{file.path}: {len(sigmas)} sigmas do not hold the steps and their ends")
    return sigmas, place

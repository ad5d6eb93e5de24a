"""Steps that another trainer sampled, from safetensors; no more is read than is looked at.

Legend: B samples, T steps of each, S steps of the schedule, D elements of a latent.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from flowgrpo_rc.core.transition import KINDS
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping

MOST_SAMPLES = 256  # that are looked at, of all files
MOST_ELEMENTS = 2**26  # of a tensor that are read, of all files
# What tensors and settings are called in the code of flow_grpo, UniRL, verl-omni and this package.
NAMES = {
    **{"log_probs": "rollout_log_probs", "sde_logp": "rollout_log_probs"},
    **{"sde_means": "means", "old_prev_sample_mean": "means", "prev_sample_mean": "means"},
    **{"all_latents": "latents", "all_timesteps": "timesteps", "sde_indices": "step_indices"},
    **{"eta": "noise_level", "clip_range": "clip_ratio"},
}
NEEDED = ("noise_level", "sde_type")
TABLES = {"rollout": "rollout_log_probs", "old": "old_log_probs", "new": "new_log_probs"}
TABLES |= {"timesteps": "timesteps", "place": "step_indices"}


class Dump(NamedTuple):
    """Holds what is looked at; None where a file lacks it."""

    settings: Mapping[str, Any]  # sde_type, noise_level, clip_ratio and others that a file says
    shape: Sequence[int]  # of a latent
    sigmas: Tensor  # the schedule, float64 [S+1]
    prompts: Sequence[str]  # of each sample; empty if not said
    start: Tensor  # states before the steps, fp32 [B, T, D]
    end: Tensor  # states behind the steps, [B, T, D]
    rollout: Tensor  # log-probs of the policy that sampled, float64 [B, T]
    place: Tensor  # of each step in the schedule, int64 [B, T]
    means: Tensor | None = None  # that the ends were drawn about, [B, T, D]
    old: Tensor | None = None  # log-probs of the training graph before any update, [B, T]
    new: Tensor | None = None  # of the training graph after an update, [B, T]
    timesteps: Tensor | None = None  # [B, T]
    advantages: Tensor | None = None  # of all samples, also of those that are not looked at
    group: Tensor | None = None  # likewise

    def by_step(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and number of the finite values [B, T] of each step of the schedule, [S]."""
        known = torch.isfinite(values).flatten()
        place = self.place.flatten()
        zeros = torch.zeros(len(self.sigmas) - 1, dtype=torch.float64)
        count = zeros.index_add(0, place, known.double())
        return zeros.index_add(0, place, torch.where(known, values.flatten(), 0.0)) / count, count

    def sigma(self, by: int = 0) -> Tensor:
        """Returns the noise level so many places behind each step's start, [B, T], or nan."""
        padded = torch.cat([self.sigmas, self.sigmas.new_full((3,), math.nan)])
        return padded[self.place + by]  # place -1 is the last one


def read_dump(path: Path) -> Dump:
    """Reads a .safetensors file, or those of a folder by name; ValueError for anything else."""
    paths = sorted(path.iterdir()) if path.is_dir() else [path, path.with_suffix(".json")]
    files = [file for file in paths if file.suffix == ".safetensors" and file.exists()]
    if not files:
        raise ValueError(
            f"{path}: give a .safetensors file that exists, or a folder with one. A pickle (.pt, "
            ".pkl, .bin) can run code and is not read: save its tensors with "
            "safetensors.torch.save_file; the page about diagnose has ten lines for each trainer"
        )
    stems = {file.stem for file in files}
    notes = [file for file in paths if file.suffix == ".json" and file.exists()]
    files = files[:: math.ceil(len(files) / MOST_SAMPLES)]  # evenly spread ones of too many
    dumps: list[Dump] = []
    for number, file in enumerate(files):
        with blaming(file), safe_open(file, framework="pt") as handle:
            # The notes of its own, and those of the whole folder.
            of_file = [note for note in notes if note.stem not in stems - {file.stem}]
            settings = _settings(handle.metadata() or {}, of_file)
            dumps.append(_read(_Tensors(handle, len(files)), settings, number))
            if not _alike(dumps[0], dumps[-1]):
                raise ValueError("its steps, sigmas or settings are not those of the first file")
    joined: dict[str, Any] = {"prompts": [text for dump in dumps for text in dump.prompts]}
    for name in Dump._fields[4:]:
        tensors = [getattr(dump, name) for dump in dumps]
        joined[name] = None if any(tensor is None for tensor in tensors) else torch.cat(tensors)
    return dumps[0]._replace(**joined)


def _alike(first: Dump, other: Dump) -> bool:
    """Returns whether two files can be joined."""
    return (
        all(first.settings[name] == other.settings[name] for name in NEEDED)
        and torch.equal(first.sigmas.nan_to_num(), other.sigmas.nan_to_num())
        and first.start.shape[1:] == other.start.shape[1:]
    )


def _settings(metadata: Mapping[str, str], notes: Sequence[Path]) -> dict[str, Any]:
    """Returns the settings of a file, by our names, with numbers as numbers."""
    values: dict[str, Any] = {"trainer": "unknown", **metadata}
    if "rollout" in values:  # a file of this package
        values |= parse_mapping(values["rollout"])["spec"] | {"trainer": "flowgrpo_rc"}
    for note in notes:
        values |= read_mapping(note)
    settings = {NAMES.get(name, name): value for name, value in values.items()}
    for name in {"noise_level", "clip_ratio", "guidance_scale"} & settings.keys():
        with blaming(name):
            settings[name] = float(settings[name])
        if not 0 < settings[name] < math.inf:
            raise ValueError(f"{name}={settings[name]:g} must be above 0")
    if not {*NEEDED} <= settings.keys() or settings["sde_type"] not in KINDS:
        kinds = f"{' and '.join(NEEDED)} ({', '.join(KINDS)})"
        present = {name: settings[name] for name in NEEDED if name in settings} or "neither"
        raise ValueError(
            f"it needs {kinds}, in its metadata or in a JSON of the same name, and has {present}"
        )
    return settings


class _Tensors:
    """Holds the tensors of one of some open files, by our names; read only when asked for."""

    def __init__(self, handle: Any, files: int) -> None:
        self.names = {NAMES.get(key, key): key for key in handle.keys()}  # noqa: SIM118
        self._handle = handle
        self.files = files

    def shape(self, name: str) -> list[int]:
        if name not in self.names:
            raise ValueError(f"it has no tensor {name!r}, but {', '.join(sorted(self.names))}")
        return list(self._handle.get_slice(self.names[name]).get_shape())

    def read(self, name: str, samples: int | None = None) -> Tensor:
        shape = self.shape(name)
        if math.prod([samples or 1, *shape[samples is not None :]]) * self.files > MOST_ELEMENTS:
            of_all = f"in each of {self.files} file(s)"
            raise ValueError(f"{name} has shape {shape} {of_all}: too large to look at")
        tensor: Tensor = self._handle.get_slice(self.names[name])[:samples]
        broken = (~torch.isfinite(tensor)).nonzero().tolist()
        if broken:
            raise ValueError(f"{len(broken)} numbers of {name} are nan or inf, as at {broken[0]}")
        return tensor


def _read(file: _Tensors, settings: dict[str, Any], number: int) -> Dump:
    """Reads one of some files."""
    names = file.names
    log_probs = file.shape("rollout_log_probs")
    rows, steps, *_ = [*log_probs, 0]
    latents = file.shape("latents")
    size = math.prod(latents[1:])

    def check(name: str, fits: bool) -> None:
        if not fits:
            raise ValueError(
                f"{name} {file.shape(name)} does not fit latents {latents} and rollout_log_probs "
                f"{log_probs}: give states [B, T+1, ...], means [B, T, ...] and the others [B, T]"
            )

    check("latents", bool(steps and size) and len(latents) > 2 and latents[0] == rows)
    samples = min(rows, max(min(MOST_SAMPLES, MOST_ELEMENTS // size) // file.files, 1))

    def states(name: str, first: int) -> Tensor:
        shape = file.shape(name)
        check(name, shape[2:] == latents[2:] and shape[1] >= first + steps)
        return file.read(name, samples)[:, first : first + steps].flatten(2).float()

    tensors: dict[str, Tensor] = {}
    for field, name in TABLES.items():
        if name in names:
            values = file.read(name).double()
            check(name, values.shape in ((rows, steps), (rows, 1), (steps,)))
            tensors[field] = values.expand(rows, steps)[:samples]
    follows = "next_latents" not in names
    if follows and "place" in tensors and (tensors["place"].diff() != 1).any():
        skipped = "its steps are not consecutive"
        raise ValueError(f"{skipped}: dump latents and next_latents, [B, T, ...]")
    for name in {"advantages", "group"} & names.keys():
        tensors[name] = file.read(name).double().reshape(rows, -1)[:, 0]
    if "group" in tensors:
        tensors["group"] += number * 2.0**32  # those of another file are other groups
    if "means" in names:
        tensors["means"] = states("means", 0)
    texts = settings.pop("prompts", [])
    if isinstance(texts, str):
        texts = json.loads(texts)
    if len(texts) not in (0, rows):
        raise ValueError(f"prompts holds {len(texts)} texts: give one for each of {rows} samples")
    sigmas = _sigmas(file, tensors)
    place = tensors.pop("place", torch.arange(steps).expand(samples, steps)).long()
    if not 0 <= int(place.min()) <= int(place.max()) < len(sigmas) - 1:
        raise ValueError(f"{len(sigmas)} sigmas do not hold all steps: dump step_indices")
    return Dump(
        settings=settings,
        shape=latents[2:],
        sigmas=sigmas,
        prompts=texts[:samples],
        start=states("latents", 0),
        end=states("latents", 1) if follows else states("next_latents", 0),
        place=place,
        **tensors,
    )


def _sigmas(file: _Tensors, tensors: dict[str, Tensor]) -> Tensor:
    """Reads the schedule; without it, timesteps tell it, and where in it the steps are."""
    if "sigmas" not in file.names and "timesteps" in tensors:
        levels = tensors["timesteps"].unique().flip(0)
        tensors["place"] = (tensors["timesteps"].unsqueeze(2) == levels).long().argmax(2)
        # Where the last step ends is not known.
        return torch.cat([levels / 1000, levels.new_tensor([math.nan])])
    sigmas = file.read("sigmas").double()
    falls = sigmas.ndim == 1 and (sigmas.diff() < 0).all()
    if not falls or not 0 <= sigmas[-1] < sigmas[0] <= 1:
        raise ValueError("sigmas must be a list that falls from at most 1 to at least 0")
    return sigmas

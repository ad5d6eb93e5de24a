"""Steps that another trainer sampled, from a safetensors file; no more is read than is looked at.

Legend: B samples, T steps of each, S steps of the schedule, D elements of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from flowgrpo_rc.core.transition import KINDS
from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping

MOST_SAMPLES = 256  # that are looked at
MOST_ELEMENTS = 2**26  # of a tensor that is read
# What tensors and settings are called in the code of flow_grpo, UniRL, verl-omni and this package.
NAMES = {
    **{"log_probs": "rollout_log_probs", "sde_logp": "rollout_log_probs"},
    **{"sde_means": "means", "old_prev_sample_mean": "means", "prev_sample_mean": "means"},
    **{"all_latents": "latents", "all_timesteps": "timesteps", "sde_indices": "step_indices"},
    **{"eta": "noise_level", "clip_range": "clip_ratio"},
}
OWN = {"log_probs": "flow_grpo", "sde_logp": "UniRL", "all_timesteps": "verl-omni"}


class Dump(NamedTuple):
    """Holds what is looked at; None where it was not dumped."""

    settings: Mapping[str, Any]  # sde_type, noise_level, clip_ratio and others that were told
    start: Tensor  # states before the steps, fp32 [B, T, D]
    end: Tensor  # states behind the steps, [B, T, D]
    means: Tensor | None  # that these were drawn about, [B, T, D]
    rollout: Tensor  # log-probs of the policy that sampled, float64 [B, T]
    old: Tensor | None  # of the training graph before any update, [B, T]
    new: Tensor | None  # of the training graph after an update, [B, T]
    timesteps: Tensor | None  # [B, T]
    sigmas: Tensor  # the schedule, float64 [S+1]; nan where it is not known
    place: Tensor  # of each step in the schedule, int64 [B, T]
    advantages: Tensor | None  # float64, of all samples of the file
    group: Tensor | None  # of all samples of the file


def read_dump(path: Path) -> Dump:
    """Reads a .safetensors file, or the first one of a folder; ValueError for anything else."""
    there = sorted(path.iterdir()) if path.is_dir() else [path, path.with_suffix(".json")]
    files = [one for one in there if one.suffix == ".safetensors" and one.exists()]
    if not files:
        raise ValueError(
            f"{path}: give a .safetensors file that exists, or a folder with one. A pickle (.pt, "
            ".pkl, .bin) can run code and is not read: save its tensors with "
            "safetensors.torch.save_file; the page about diagnose has ten lines for each trainer"
        )
    with blaming(path), safe_open(files[0], framework="pt") as handle:
        told = dict(handle.metadata() or {})
        if "rollout" in told:
            told |= parse_mapping(told["rollout"])["spec"] | {"trainer": "flowgrpo_rc"}
        for one in there:
            told |= read_mapping(one) if one.suffix == ".json" and one.exists() else {}
        own = [trainer for name, trainer in OWN.items() if name in handle.keys()]  # noqa: SIM118
        told = {"trainer": (*own, "unknown")[0]} | told
        return _dump(handle, _checked({NAMES.get(name, name): told[name] for name in told}))


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with numbers as numbers."""
    for name in {"noise_level", "clip_ratio", "guidance_scale"} & settings.keys():
        settings[name] = float(settings[name])
        if not 0 < settings[name] < math.inf:
            raise ValueError(f"{name}={settings[name]:g} must be above 0")
    if "noise_level" not in settings or settings.get("sde_type") not in KINDS:
        kinds = f"noise_level and sde_type ({', '.join(KINDS)})"
        raise ValueError(f"it needs {kinds}, in its metadata or in a JSON of the same name")
    return settings


def _dump(handle: Any, settings: dict[str, Any]) -> Dump:
    names = {NAMES.get(key, key): key for key in handle.keys()}  # noqa: SIM118, it is no mapping

    def shape(name: str) -> list[int]:
        if name not in names:
            raise ValueError(f"it has no tensor {name!r}, but {', '.join(sorted(names))}")
        return list(handle.get_slice(names[name]).get_shape())

    def read(name: str, samples: int | None = None) -> Tensor | None:
        if name not in names:
            return None
        if math.prod([samples or 1, *shape(name)[samples is not None :]]) > MOST_ELEMENTS:
            raise ValueError(f"{name} has shape {shape(name)}, which is too large to look at")
        found: Tensor = handle.get_slice(names[name])[:samples]
        broken = (~torch.isfinite(found)).nonzero().tolist()
        if broken:
            raise ValueError(f"{len(broken)} numbers of {name} are nan or inf, as at {broken[0]}")
        return found

    (rows, steps, *_), latents = [*shape("rollout_log_probs"), 0], shape("latents")
    size = math.prod(latents[1:])
    if not steps or len(latents) < 3 or not size or latents[0] != rows:
        both = f"latents {latents} and log-probs {shape('rollout_log_probs')}"
        raise ValueError(f"{both} do not fit: give latents [B, T+1, ...] and log-probs [B, T]")
    samples = min(rows, MOST_SAMPLES, max(MOST_ELEMENTS // size, 1))

    def table(name: str) -> Tensor | None:
        found = read(name)
        if found is not None and found.shape not in ((rows, steps), (rows, 1), (steps,)):
            raise ValueError(f"{name} has shape {list(found.shape)}, not [{rows}, {steps}]")
        return None if found is None else found.double().expand(rows, steps)[:samples]

    def states(name: str, first: int) -> Tensor:
        found = read(name, samples)
        if found is None or [*found.shape[2:]] != latents[2:] or found.shape[1] < first + steps:
            raise ValueError(f"{name} {shape(name)} do not fit {steps} steps of latents {latents}")
        return found[:, first : first + steps].flatten(2).float()

    follows = "next_latents" not in names
    timesteps, advantages, indices = table("timesteps"), read("advantages"), table("step_indices")
    sigmas, place = _schedule(read("sigmas"), timesteps, indices, steps)
    if follows and indices is not None and (indices.diff() != 1).any():
        raise ValueError(
            "its steps are not consecutive: dump latents and next_latents, [B, T, ...]"
        )
    return Dump(
        settings=settings,
        start=states("latents", 0),
        end=states("latents", 1) if follows else states("next_latents", 0),
        means=states("means", 0) if "means" in names else None,
        rollout=torch.as_tensor(table("rollout_log_probs")),
        old=table("old_log_probs"),
        new=table("new_log_probs"),
        timesteps=timesteps,
        sigmas=sigmas,
        place=place.expand(samples, steps),
        advantages=None if advantages is None else advantages.double().reshape(rows, -1)[:, 0],
        group=read("group"),
    )


def _schedule(
    sigmas: Tensor | None, timesteps: Tensor | None, steps: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the noise levels [S+1] and where each step is in them, [B, T] or [T]."""
    if sigmas is None:
        if timesteps is None:
            raise ValueError("it has neither sigmas nor timesteps: dump one of them")
        given = timesteps.unique().flip(0)
        # Where the last step ends is not known.
        sigmas = torch.cat([given / 1000, given.new_tensor([math.nan])])
        return sigmas, (timesteps.unsqueeze(2) == given).long().argmax(2)
    sigmas = sigmas.double()
    if sigmas.ndim > 1 or not (sigmas.diff() < 0).all() or not 0 <= sigmas[-1] < sigmas[0] <= 1:
        raise ValueError("sigmas must be a list that falls from at most 1 to at least 0")
    place = torch.arange(count)
    if steps is not None:
        place = steps.long()
    elif len(sigmas) != count + 1 and timesteps is not None:  # the window with the nearest ones
        windows = 1000 * sigmas[:-1].unfold(0, count, 1)
        place = (timesteps.unsqueeze(1) - windows).abs().sum(2).argmin(1, keepdim=True) + place
    if not 0 <= int(place.min()) <= int(place.max()) < len(sigmas) - 1:
        raise ValueError(f"{len(sigmas)} sigmas do not hold all steps and their ends")
    return sigmas, place

"""Every planted fault is named first, and no clean dump is accused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dumps import Made, sigmas_of, std_of, write_dump
from torch import Tensor

from flowgrpo_rc.diagnosis.checks import examine
from flowgrpo_rc.diagnosis.dump import read_dump


def step_behind(how: Made, sigmas: list[float], i: int) -> float:
    return std_of(how.kind, how.level, sigmas[i + 1], sigmas[i + 2], sigmas[1])


def other_end(how: Made, sigmas: list[float], i: int) -> float:
    end = sigmas[i + 1]
    return std_of(how.kind, how.level, end, 2 * end - sigmas[i], sigmas[1])


def without_dt(how: Made, sigmas: list[float], i: int) -> float:
    right = std_of(how.kind, how.level, sigmas[i], sigmas[i + 1], sigmas[1])
    return right / math.sqrt(sigmas[i] - sigmas[i + 1])


def shared(noise: Tensor, groups: int, n: int) -> Tensor:
    by_group = noise.unflatten(0, (groups, n))
    return by_group[:, :1].expand_as(by_group).flatten(0, 1)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return apply


def same_as_old(tensors: dict[str, Tensor]) -> None:
    tensors["new_log_probs"] = tensors["old_log_probs"].clone()


def bf16(values: Tensor) -> Tensor:
    return values.bfloat16().to(values)


PLAIN = {"change": changed("sigmas", lambda _: torch.tensor(sigmas_of(9, 1.0)))}
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("convention", {"engine_form": "sum"}),
    ("convention", {"engine_form": "sum", "trainer_form": "sum", "means": False}),
    ("convention", {"engine_form": "half", "trainer_form": "half"}),
    ("convention", {"engine_form": "plain", "means": False}),
    ("convention", {"trainer_form": "no log 2 pi"}),
    ("convention", {"engine_form": "short", "kind": "dance_sde", "level": 0.4}),
    ("convention", {"trainer_form": "gaussian", "kind": "cps", "level": 0.8, "means": False}),
    ("sigma", {"trainer_std": step_behind, "means": False}),
    ("sigma", {"engine_std": other_end}),
    ("sigma", {"engine_std": without_dt, "trainer_std": without_dt, "means": False}),
    ("sigma", PLAIN),
    ("sde_type", {"kind": "dance_sde", "level": 0.6, "settings": {"sde_type": "sde"}}),
    ("sde_type", {"kind": "cps", "settings": {"sde_type": "dance_sde"}, "means": False}),
    ("noise_level", {"level": 1.1, "settings": {"noise_level": 0.8}, "means": False}),
    ("noise", {"noise": shared}),
    ("noise", {"noise": shared, "means": False, "level": 1.0}),
    ("noise", {"noise": lambda noise, groups, n: 0.93 * noise}),
    ("latents", {"stored": bf16, "means": False}),
    ("timestep", {"change": changed("timesteps", torch.floor)}),
    ("timestep", {"change": changed("timesteps", bf16), "means": False}),
    ("log_probs", {"change": changed("old_log_probs", bf16)}),
    ("stale", {"stale": (0.3, 0.3), "settings": {"guidance_scale": 1.0}, "means": False}),
    ("stale", {"stale": (1.0, 0.4)}),
    ("lora", {"change": same_as_old}),
    ("no_signal", {"change": changed("advantages", torch.zeros_like)}),
    ("advantages", {"change": changed("advantages", lambda values: values + 0.4)}),
    ("clip_wide", {"settings": {"clip_ratio": 0.2}}),
    ("clip_narrow", {"settings": {"clip_ratio": 1e-5}, "means": False}),
]
CLEAN: list[dict[str, Any]] = [
    {},
    {"means": False},
    {"kind": "cps", "level": 0.6},
    {"kind": "cps", "level": 0.9, "means": False, "steps": 5},
    {"kind": "cps", "level": 0.7, "engine_form": "gaussian", "trainer_form": "gaussian"},
    {"kind": "dance_sde", "level": 0.3},
    {"kind": "dance_sde", "level": 0.9, "means": False, "shift": 1.0},
    {"steps": 16, "shape": (16, 16, 16), "groups": 2},
    {"steps": 3, "groups": 1, "n": 24, "shape": (16, 8, 8), "means": False},
    {"level": 1.2, "error": 0.03, "means": False},
    {"error": 0.004, "settings": {"clip_ratio": 1e-3}, "groups": 5, "n": 4},
    {"engine_form": "plain", "trainer_form": "plain"},  # as verl-omni has it for Bagel
]


def first(folder: Path, seed: int, how: dict[str, Any]) -> str:
    dump = write_dump(folder / "dump.safetensors", Made(**{"seed": seed, "steps": 9, "n": 7} | how))
    found = examine(read_dump(dump))
    return found[0][0] if found else ""


def test_planted_faults_are_named_first(tmp_path: Path) -> None:
    assert len({cause for cause, _ in FAULTS}) >= 12
    named = [first(tmp_path, 90210 + i, how) for i, (_, how) in enumerate(FAULTS)]
    wrong = [(i, *pair) for i, pair in enumerate(zip(named, FAULTS, strict=True))]
    wrong = [each for each in wrong if each[1] != each[2][0]]
    assert len(wrong) <= len(FAULTS) // 10, wrong


@pytest.mark.parametrize("how", CLEAN, ids=str)
def test_clean_dumps_are_not_accused(how: dict[str, Any], tmp_path: Path) -> None:
    assert first(tmp_path, 555, how) == ""


def test_the_evidence_names_side_and_formula(tmp_path: Path) -> None:
    how = Made(seed=3, engine_form="sum")
    cause, evidence = examine(read_dump(write_dump(tmp_path / "a.safetensors", how)))[0]
    assert cause == "convention"
    assert "the rollout are those of a sum over the elements" in evidence


@pytest.mark.parametrize(("sizes", "words"), [({"level": 1.0}, "noise_level 1"), (PLAIN, "by 3")])
def test_a_size_is_fitted(sizes: dict[str, Any], words: str, tmp_path: Path) -> None:
    how = Made(**{"seed": 4, "steps": 9, "settings": {"noise_level": 0.7}} | sizes)
    evidence = examine(read_dump(write_dump(tmp_path / "a.safetensors", how)))[0][1]
    assert f"{words}:" in evidence or f"{words}.0" in evidence

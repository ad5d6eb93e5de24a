"""Says in a few lines what was trained, from config.yaml and environment.json.

Runs of other versions may lack any key; a line without its values is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Any

from flowgrpo_rc.monitoring.health import BYPASS_PREFIX, DECOUPLED_PREFIX
from flowgrpo_rc.report.series import Row

_PACKAGES = ("torch", "diffusers", "transformers")


def facts(
    config: Mapping[str, Any], environment: Mapping[str, Any], rows: Sequence[Row]
) -> list[tuple[str | None, str, str]]:
    """Returns lines of word (key of `words.WORDS` or None), name and value.

    Args:
      config: content of config.yaml.
      environment: content of environment.json.
      rows: the rows of metrics.jsonl.
    """
    seed = setting(config, "trainer.seed")
    lines = [
        (None, "Model", _last_name(setting(config, "model.path"))),
        ("reward", "Reward", _rewards(setting(config, "reward.terms"))),
        ("mode", "Mode", _mode(rows)),
        ("clip", "Loss and clip", _loss(config)),
        ("centered", "Log-ratio", _centered(config)),
        ("rejection", "Rejection", _rejection(config)),
        ("weight", "Weights", _weights(config)),
        ("precision", "Precision", _precision(config)),
        ("lora", "LoRA", _lora(config)),
        (None, "Seed", "" if seed is None else str(seed)),
        (None, "Started", _time(environment.get("started"))),
        (None, "Ran on", _machine(environment)),
        (None, "Versions", _versions(environment)),
    ]
    return [line for line in lines if line[2]]


def setting(tree: Mapping[str, Any], name: str) -> Any:
    """Returns the value behind a dotted name; None if there is none."""
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def broken_band(config: Mapping[str, Any], criterion: str) -> str:
    """Returns the `auto` threshold of a criterion as it was set; empty if it has none.

    Args:
      config: content of config.yaml.
      criterion: a name in `rollout_rs`.
    """
    correction = setting(config, "algorithm.rollout_correction") or {}
    criteria = _split(correction.get("rollout_rs"))
    thresholds = _split(correction.get("rollout_rs_threshold"))
    if len(thresholds) == 1:
        thresholds *= len(criteria)
    found = dict(zip(criteria, thresholds, strict=False)).get(criterion, "")
    return found if found.startswith("auto:") else ""


def _split(value: Any) -> list[str]:
    """Returns the parts of a list, or of a text with commas."""
    parts = value if isinstance(value, list) else str(value or "").split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _last_name(path: object) -> str:
    """Returns a hub id as it is, and of a path only its last name."""
    if path is None:
        return ""
    path = str(path).removeprefix("${asset:").removesuffix("}")
    return PurePath(path).name if path.startswith(("/", ".", "~")) else path


def _rewards(terms: Any) -> str:
    used = {name: term or {} for name, term in (terms or {}).items()}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{name} x {term.get('weight', 1.0):g}" for name, term in used.items())


def _mode(rows: Sequence[Row]) -> str:
    """Returns the mode, which the names of the metrics tell."""
    names = {name for row in rows for name in row}
    if any(name.startswith(BYPASS_PREFIX) for name in names):
        return "bypass"
    return "decoupled" if any(name.startswith(DECOUPLED_PREFIX) for name in names) else ""


def _loss(config: Mapping[str, Any]) -> str:
    if setting(config, "model.kind") == "causal_lm":
        loss = setting(config, "actor.token_loss") or {}
        bounds = [loss.get("clip_ratio_low"), loss.get("clip_ratio_high")]
    else:
        loss = setting(config, "actor.diffusion_loss") or {}
        bounds = [loss.get("clip_ratio")]
    sizes = dict.fromkeys(str(bound) for bound in bounds if bound is not None)
    clip = " below, ".join(sizes) + (" above" if len(sizes) > 1 else "")
    return ", clip ".join(part for part in (loss.get("loss_mode"), clip) if part)


def _centered(config: Mapping[str, Any]) -> str:
    centered = setting(config, "algorithm.rollout_correction.centered")
    return "centered" if centered else ""


def _rejection(config: Mapping[str, Any]) -> str:
    correction = setting(config, "algorithm.rollout_correction") or {}
    criteria = ", ".join(_split(correction.get("rollout_rs")))
    threshold = ", ".join(_split(correction.get("rollout_rs_threshold")))
    found = [f"{criteria} {threshold}".strip()] if criteria else []
    veto = correction.get("rollout_token_veto_threshold")
    return "; ".join([*found, f"veto {veto}"] if veto is not None else found)


def _weights(config: Mapping[str, Any]) -> str:
    correction = setting(config, "algorithm.rollout_correction") or {}
    if not correction.get("rollout_is"):
        return ""
    parts = (correction["rollout_is"], correction.get("rollout_is_mode") or "")
    words = " ".join(str(part) for part in parts if part)
    return f"{words}, bound {correction.get('rollout_is_threshold')}"


def _precision(config: Mapping[str, Any]) -> str:
    rollout = setting(config, "rollout.dtype")
    training = setting(config, "model.dtype")
    quantization = setting(config, "rollout.quantization")
    if rollout is None or training is None:
        return ""
    sampled = f"{rollout} with {quantization}" if quantization else str(rollout)
    mixed = setting(config, "trainer.mixed_precision")
    trained = f"{training} with {mixed}" if mixed not in (None, "no", False) else str(training)
    return f"rollout {sampled}, training {trained}"


def _lora(config: Mapping[str, Any]) -> str:
    rank = setting(config, "model.lora_rank")
    return f"rank {rank}, alpha {setting(config, 'model.lora_alpha')}" if rank else ""


def _time(stamp: str | None) -> str:
    return f"{datetime.fromisoformat(stamp):%Y-%m-%d %H:%M %Z}" if stamp else ""


def _machine(environment: Mapping[str, Any]) -> str:
    device = environment.get("device")
    processes = environment.get("processes")
    if device is None:
        return ""
    if processes is None:
        return str(device)
    return f"{device}, {processes} process{'' if processes == 1 else 'es'}"


def _versions(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages") or {}
    git = environment.get("git")
    parts = [f"flowgrpo-rc {packages['flowgrpo-rc']}"] if "flowgrpo-rc" in packages else []
    parts += [f"git {git}"] if git else []
    parts += [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    return ", ".join(parts)

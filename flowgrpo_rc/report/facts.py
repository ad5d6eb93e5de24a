"""Says in a few lines what was trained, from config.yaml and environment.json.

Runs of other versions may lack any key; a line without its values is left out.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import PurePath
from typing import Any

from flowgrpo_rc.monitoring.health import BYPASS_PREFIX, DECOUPLED_PREFIX
from flowgrpo_rc.report.folder import setting
from flowgrpo_rc.report.series import Row

_VERSIONS = ("flowgrpo-rc", "git", "torch", "diffusers", "transformers")


def facts(
    config: Mapping[str, Any], environment: Mapping[str, Any], rows: Sequence[Row]
) -> list[tuple[str, str, str]]:
    """Returns lines of word (a key of words.yaml, or empty), name and value."""
    get = partial(setting, config)
    text = get("model.kind") == "causal_lm"
    loss = get("actor.token_loss" if text else "actor.diffusion_loss") or {}
    correction = get("algorithm.rollout_correction") or {}
    rank = get("model.lora_rank")
    seed = get("trainer.seed")
    started = environment.get("started")
    packages = (environment.get("packages") or {}) | {"git": environment.get("git")}
    versions = [f"{name} {packages[name]}" for name in _VERSIONS if packages.get(name)]
    lines = [
        ("", "Model", _model_name(get("model.path"))),
        ("reward", "Reward", _rewards(get("reward.terms"))),
        ("mode", "Mode", _mode(rows)),
        ("clip", "Loss and clip", _loss(loss)),
        ("centered", "Log-ratio", "centered" if correction.get("centered") else ""),
        ("rejection", "Rejection", _rejection(correction)),
        ("weight", "Weights", _weights(correction)),
        ("precision", "Precision", _precision(config)),
        ("lora", "LoRA", f"rank {rank}, alpha {get('model.lora_alpha')}" if rank else ""),
        ("", "First prompt", str(environment.get("first_prompt") or "")),
        ("", "Seed", "" if seed is None else str(seed)),
        ("", "Started", f"{datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}" if started else ""),
        ("", "Ran on", _machine(environment)),
        ("", "Versions", ", ".join(versions)),
    ]
    return [line for line in lines if line[2]]


def told(
    config: Mapping[str, Any], start: Mapping[str, Any], *, has_mode: bool, first_prompt: str = ""
) -> str:
    """Returns what a run with these settings would train, a line for each fact.

    Args:
      config: the settings of the run.
      start: those that it was started with, where it decided something itself.
      has_mode: whether it has log-probs to correct, in bypass or decoupled mode.
      first_prompt: the first prompt of a language model, as tokens.
    """
    shown = facts(config, {"first_prompt": first_prompt}, [])
    lines = {name: value for _, name, value in shown}
    if has_mode:
        ratio_lines = ratio(config, start)
        first = {name: lines[name] for name in ("Model", "Reward") if name in lines}
        rest = {name: value for name, value in lines.items() if name not in first | ratio_lines}
        lines = first | ratio_lines | rest
    return "\n".join(f"  {name:13}  {value}" for name, value in lines.items())


def ratio(config: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the ratio of the loss is and what bounds it, and why, by name; as `told`."""
    correction, start_correction = (
        setting(tree, "algorithm.rollout_correction") or {} for tree in (config, start)
    )
    text = setting(config, "model.kind") == "causal_lm"
    loss = setting(config, f"actor.{'token' if text else 'diffusion'}_loss") or {}
    bypass = bool(correction.get("bypass_mode"))
    log_ratio = "centered" if correction.get("centered") else "plain"
    why = f"centered={start_correction.get('centered')}".lower()
    if start_correction.get("centered") is None:
        has = "records its means" if correction.get("centered") else "records no means"
        why = "text has no means" if text else f"its rollout {has}"
    if bypass and loss.get("loss_mode") == "grpo_guard":
        log_ratio = "centered"
        why = "GRPO-Guard's own"
    anchor = "the rollout's policy" if bypass else "the recomputed old policy"
    clip = _loss(loss)
    start_clip = setting(start, "actor.diffusion_loss.clip_ratio")
    if correction.get("loss_type") == "reinforce":
        clip = "reinforce, no clip"
    elif not text and start_clip != loss.get("clip_ratio"):
        clip += (
            f" in place of {start_clip}, which follows the mismatch of new samples in bypass "
            "mode, if the loss says what it clips"
        )
    return {
        "Log-ratio": f"{log_ratio} ({why})",
        "Mode": f"{'bypass' if bypass else 'decoupled'} (bypass_mode={str(bypass).lower()}), "
        f"current policy over {anchor}",
        "Loss and clip": clip,
        "Rejection": _rejection(correction) or "none",
    }


def _split(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else str(value or "").split(",")
    return [str(item).strip() for item in texts if str(item).strip()]


def _model_name(path: Any) -> str:
    """Returns a hub id as it is, and of a path only its last name."""
    name = str(path or "").removeprefix("${asset:").removesuffix("}")
    return PurePath(name).name if name.startswith(("/", ".", "~")) else name


def _rewards(terms: Any) -> str:
    used = {name: term for name, term in (terms or {}).items() if term is not None}
    if len(used) == 1:
        return str(next(iter(used)))
    return ", ".join(f"{name} x {term.get('weight', 1.0):g}" for name, term in used.items())


def _mode(rows: Sequence[Row]) -> str:
    """Returns the mode, which the names of the metrics tell."""
    names = {name for row in rows for name in row}
    if any(name.startswith(BYPASS_PREFIX) for name in names):
        return "bypass"
    return "decoupled" if any(name.startswith(DECOUPLED_PREFIX) for name in names) else ""


def _loss(loss: Mapping[str, Any]) -> str:
    keys = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    if loss.get("loss_mode") == "flow_dppo":
        return f"flow_dppo, KL of a step below {loss.get('kl_threshold')}"
    bounds = [loss.get(key) for key in keys]
    sizes = dict.fromkeys(str(bound) for bound in bounds if bound is not None)
    clip = " below, ".join(sizes) + (" above" if len(sizes) > 1 else "")
    return ", clip ".join(phrase for phrase in (loss.get("loss_mode"), clip) if phrase)


def _rejection(correction: Mapping[str, Any]) -> str:
    criteria = ", ".join(_split(correction.get("rollout_rs")))
    threshold = ", ".join(_split(correction.get("rollout_rs_threshold")))
    phrases = [f"{criteria} {threshold}".strip()] if criteria else []
    veto = correction.get("rollout_token_veto_threshold")
    return "; ".join([*phrases, f"veto {veto}"] if veto is not None else phrases)


def _weights(correction: Mapping[str, Any]) -> str:
    if not correction.get("rollout_is"):
        return ""
    choices = (correction["rollout_is"], correction.get("rollout_is_mode"))
    words = " ".join(str(choice) for choice in choices if choice)
    return f"{words}, bound {correction.get('rollout_is_threshold')}"


def _precision(config: Mapping[str, Any]) -> str:
    rollout = setting(config, "rollout.dtype")
    training = setting(config, "model.dtype")
    if rollout is None or training is None:
        return ""
    quantization = setting(config, "rollout.quantization")
    sampled = f"{rollout} with {quantization}" if quantization else str(rollout)
    mixed, packed = (
        setting(config, key) for key in ("trainer.mixed_precision", "model.quantization")
    )
    trained = f"{training} with {mixed}" if mixed not in (None, "no", False) else str(training)
    trained += f" with {packed} weights" if packed else ""
    return f"rollout {sampled}, training {trained}"


def _machine(environment: Mapping[str, Any]) -> str:
    device = environment.get("device")
    processes = environment.get("processes")
    if device is None or processes is None:
        return str(device or "")
    return f"{device}, {processes} process{'' if processes == 1 else 'es'}"

"""Reads `rules.yaml`, the table of what two sections of the configuration need of each other."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path

import yaml

from flowgrpo_rc.config.translate import write
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.auto_clip import bounded_option
from flowgrpo_rc.losses.base import DIFFUSION_KEY, ImageLoss
from flowgrpo_rc.spec.run_spec import RunSpec, exact_rollout

_DEFAULTS = Config()


@dataclass(frozen=True, kw_only=True)
class SettingsRule:
    """A row of the table, whose head says what each field means."""

    why: str
    when: str | list[str] = ""
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    remedy: str = ""


@cache
def rules() -> list[SettingsRule]:
    """Returns the rows of the table."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return [SettingsRule(**row) for row in rows]


def check_rules(spec: RunSpec) -> None:
    """Raises ValueError for the first rule that the settings break."""
    for _, _, message in refusals(spec):
        raise ValueError(message)


def refusals(spec: RunSpec) -> Iterator[tuple[SettingsRule, str, str]]:
    """Yields each rule that the settings break, the condition that breaks it, and the message."""
    for rule in rules():
        conditions = [rule.when] if isinstance(rule.when, str) else rule.when
        held = [words_of(condition, spec) for condition in conditions if condition]
        if not all(held):
            continue
        when = " and ".join(held)
        for condition, words, remedy in _broken(rule, when, spec):
            yield rule, condition, f"{words}: {rule.why}; {rule.remedy or remedy}"


def _broken(rule: SettingsRule, when: str, spec: RunSpec) -> Iterator[tuple[str, str, str]]:
    """Yields each condition that breaks a rule, how the settings break it, and a remedy."""
    for condition in rule.needs:
        if not words_of(condition, spec):
            value = attrgetter(condition.partition("=")[0])(spec.settings)
            yield (
                condition,
                f"{when} needs {condition} (it is {write(value)})",
                "set it, or drop one",
            )
    for condition in rule.excludes:
        if words := words_of(condition, spec):
            both = f"{when} does not go with {words}" if when else words
            yield condition, both, "drop one of them"
    for key in rule.unread:
        value, default = attrgetter(key)(spec.settings), attrgetter(key)(_DEFAULTS)
        if value != default and is_dataclass(value):
            yield key, f"{key} is set, and has no effect with {when}", "drop it"
        elif value != default:
            remedy = f"drop it, or give its default where a file sets it, {key}={write(default)}"
            yield key, f"{key}={write(value)} has no effect with {when}", remedy


def words_of(condition: str, spec: RunSpec) -> str:
    """Returns the settings that make a condition hold, and "" if it does not hold."""
    if condition in _CONDITIONS:
        return _CONDITIONS[condition](spec)
    key, is_pair, wanted = condition.partition("=")
    value = attrgetter(key)(spec.settings)
    holds = write(value) == wanted if is_pair else bool(value)
    return f"{key}={write(value)}" if holds else ""


# --- Conditions that are no setting alone


def _trains_on_steps(spec: RunSpec) -> str:
    return "" if spec.is_text or spec.forward_loss is not None else _loss_mode(spec)


def _trains_on_samples(spec: RunSpec) -> str:
    return "" if spec.forward_loss is None else _loss_mode(spec)


def _loss_mode(spec: RunSpec) -> str:
    return f"{DIFFUSION_KEY}.loss_mode={spec.settings.actor.diffusion_loss.loss_mode}"


def _more_times_than_levels(spec: RunSpec) -> str:
    times = 0 if spec.forward_loss is None else spec.forward_loss.times or 0
    levels = spec.settings.rollout.evaluations()
    levels_key = "rollout.pipeline.num_inference_steps"
    told = f"{DIFFUSION_KEY}.times={times} of {levels} noise levels ({levels_key})"
    return told if times > levels else ""


def _more_steps_than_trained(spec: RunSpec) -> str:
    steps = 0 if spec.is_text else spec.settings.actor.steps_per_forward or 1
    where = "SDE steps (rollout.algo.sde_window_size)"
    if spec.forward_loss is not None:
        where = f"noise levels ({DIFFUSION_KEY}.times)"
    told = f"actor.steps_per_forward={steps} of {spec.trained_steps} {where}"
    return told if steps > spec.trained_steps else ""


def _averages_after_the_end(spec: RunSpec) -> str:
    average, updates = spec.settings.actor.ema, spec.total_updates
    told = f"actor.ema.update_interval={average.update_interval} of {updates} updates"
    return told if average.enable and average.update_interval > updates else ""


def _adds_a_kl(spec: RunSpec) -> str:
    adds = isinstance(spec.loss, ImageLoss) and spec.loss.needs_density
    return f"{_loss_mode(spec)}, which adds a KL to the log-ratio" if adds else ""


def _bound_that_follows(spec: RunSpec) -> str:
    section = spec.settings.actor.diffusion_loss
    names = [] if spec.is_text else section.auto
    return " and ".join(f"{DIFFUSION_KEY}.{name}={vars(section)[name]}" for name in names)


def _two_bounds_that_follow(spec: RunSpec) -> str:
    return "each other" if len(spec.settings.actor.diffusion_loss.auto) > 1 else ""


def _bound_without_a_name(spec: RunSpec) -> str:
    named = bounded_option(spec.step_loss, spec.settings.rollout.algo.log_prob_convention)
    names = [name for name in spec.settings.actor.diffusion_loss.auto if name != named]
    return f"{_loss_mode(spec)}, which does not say what {names[0]} bounds" if names else ""


def _rejects_by_step_kl(spec: RunSpec) -> str:
    return f"{KEY}.rollout_rs=step_kl" if spec.rules.needs_means else ""


def _band_that_follows(spec: RunSpec) -> str:
    return f"{KEY}.rollout_rs_threshold=auto:k" if spec.rules.auto else ""


def _trains_on_all(spec: RunSpec) -> str:
    n = spec.settings.rollout.n
    return f"training on all samples, rollout.n={n}" if spec.trained_n is None else ""


def _is_exact(spec: RunSpec) -> str:
    rollout = spec.settings.rollout
    is_exact = exact_rollout(spec.settings) == replace(rollout, merge_lora=False)
    return f"rollout.dtype={rollout.dtype}" if is_exact else ""


# What a condition without a dot names in the table.
_CONDITIONS: Mapping[str, Callable[[RunSpec], str]] = {
    check.__name__.removeprefix("_"): check
    for check in (
        _trains_on_steps,
        _trains_on_samples,
        _more_times_than_levels,
        _more_steps_than_trained,
        _averages_after_the_end,
        _adds_a_kl,
        _bound_that_follows,
        _two_bounds_that_follow,
        _bound_without_a_name,
        _rejects_by_step_kl,
        _band_that_follows,
        _trains_on_all,
        _is_exact,
    )
}

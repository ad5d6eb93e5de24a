"""Judges whether the correction is healthy: what the rules say of a step, and when that is told.

A rule whose metric is absent is skipped: without importance weights, for example, there is no
largest one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.metric_names import other_names
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.monitoring.guards import Guards
from flowgrpo_rc.monitoring.health_rules import RULES, Setup
from flowgrpo_rc.monitoring.mismatch import advised_clip_ratio
from flowgrpo_rc.monitoring.pictures import PictureWatch

DECOUPLED_PREFIX = "rollout_corr/"
BYPASS_PREFIX = "actor/rollout_corr/"

MOST_CLIPPED = 0.3  # share of the differences that may lie outside the clip band
FAULT = 2.0  # mismatch over what the precisions explain, from which on it is a fault
# Below this multiple of what is left without a quantization, the quantization is not applied; only
# a quantization that makes the mismatch so much larger can be judged by it.
UNQUANTIZED = 2.0
LARGEST_SHARE = 0.25
LEAST_BOUND = 0.1  # where nothing is left without it
DRIFT = 3.0  # how far pictures may move, in standard deviations between those of the base
GAIN = 0.25  # from which rise of the reward on this is held against them, in its own ones

Metrics = Mapping[str, float | None]


class _Finding(NamedTuple):
    """One rule applied to one step; `message` is "" if the rule does not hold."""

    rule: str
    message: str
    immediate: bool


class _Samples(NamedTuple):
    """Says what the samples of a step are."""

    text: bool  # responses of a language model, not images
    fresh: bool  # sampled by the weights that are trained, not by older ones
    unquantized: float | None = None  # `unquantized_share`; None without a quantization


@dataclass(frozen=True, slots=True)
class Health:
    """What the rules say of a step; true if healthy.

    Attributes:
      warnings: one sentence for each rule that holds, with the measured value, its threshold and
        the key to change.
    """

    warnings: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.warnings


def check_rollout_correction_health(
    metrics: Metrics,
    config: RolloutCorrectionConfig,
    *,
    text: bool = False,
    fresh: bool = True,
) -> Health:
    """Judges whether a step's correction metrics look healthy.

    Args:
      metrics: metrics of one step, under `rollout_corr/` (decoupled) or `actor/rollout_corr/`
        (bypass). None stands for a value that was not finite, as in metrics.jsonl.
      config: settings of the correction.
      text: whether a language model is trained.
      fresh: whether the weights that are trained made the samples, and not older ones.

    Returns:
      True if healthy; its `warnings` say what is not.
    """
    found = _findings(metrics, Setup.of(config), _Samples(text, fresh))
    return Health(tuple(finding.message for finding in found if finding.message))


def correction_metric_name(metrics: Mapping[str, Any], name: str) -> str | None:
    """Finds the full name of a correction metric.

    Args:
      metrics: metrics of a step.
      name: verl's name of the metric, without prefix.

    Returns:
      The name under which `metrics` holds it, verl's or slime's; None if it does not.
    """
    candidates = [
        prefix + known
        for known in other_names(name)
        for prefix in (DECOUPLED_PREFIX, BYPASS_PREFIX)
    ]
    return next((candidate for candidate in candidates if candidate in metrics), None)


def _finite(metrics: Metrics, name: str) -> tuple[str, float] | None:
    """Returns the full name and the value of a metric; None if it is absent or not finite."""
    full = name if name in metrics else correction_metric_name(metrics, name)
    value = None if full is None else metrics[full]
    return (full, value) if full and value is not None and math.isfinite(value) else None


def _findings(metrics: Metrics, setup: Setup, samples: _Samples) -> Iterator[_Finding]:
    yield _Finding("non_finite", _non_finite(metrics, setup), immediate=True)
    is_fault = False
    if over := _finite(metrics, "mismatch_over_expected"):
        fault = _fault(metrics, *over)
        is_fault = bool(fault)
        # A few unlikely tokens can double the mean of a step.
        yield _Finding("fault", fault, immediate=not samples.text)
        share = samples.unquantized
        if share is not None and share <= LARGEST_SHARE:
            yield _Finding("unquantized", _unquantized(*over, share), immediate=True)
    # What a fault makes the clip do is no noise, and a wider band is not the answer.
    if not is_fault and (clipped := _finite(metrics, "pre_update_clip_fraction")):
        yield _Finding("noise", _noise(metrics, *clipped, setup, samples), immediate=False)
    for rule in RULES:
        found = _finite(metrics, rule.metric)
        if found and not (is_fault and rule.name == "clipping"):
            name, value = found
            crossed = rule.judge(value, setup)
            message = f"{name} is {value:.4g}, {crossed}." if crossed else ""
            yield _Finding(rule.name, message, rule.immediate)


def _non_finite(metrics: Metrics, setup: Setup) -> str:
    """Judges what training computes; a reward or a timing cannot ruin the weights."""
    names = [
        name
        for name, value in sorted(metrics.items())
        if name.startswith((DECOUPLED_PREFIX, "actor/"))
        and (value is None or not math.isfinite(value))
    ]
    if not names:
        return ""
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    measured = metrics[names[0]]
    shown = "" if measured is None else f" but {measured}"
    return f"{names[0]}{others} is not finite{shown}: lower actor.optim.lr, or {setup.narrow}."


def _noise(metrics: Metrics, name: str, clipped: float, setup: Setup, samples: _Samples) -> str:
    """Says whether the clip acts before any update."""
    if clipped <= MOST_CLIPPED:
        return ""
    size = ""
    widen = "a wider clip band"
    if over := _finite(metrics, "mismatch_over_clip"):
        size = f", and half of them differ by {over[1]:.2g} times the clip band or more"
        if p99 := _finite(metrics, "logprob_abs_diff_p99"):
            key = f"{DIFFUSION_KEY}.clip_ratio"
            if samples.text:
                key = f"{TOKEN_KEY}.clip_ratio_low and clip_ratio_high"
            advised = advised_clip_ratio(p99[1])
            widen = f"{key} >= {advised:g} (99% differ by less than {p99[1]:.2g})"
    ways = [f"set {setup.recompute}"] if setup.recompute else []
    ways.append(f"or take {widen}")
    if samples.fresh:
        latents = "" if samples.text else ", fp32 latents in the engine"
        ways.append(f"or a more precise rollout (rollout.dtype=fp32{latents})")
    cause = "noise" if samples.fresh else "the age of their policy"
    return (
        f"{name} is {clipped:.4g}, above {MOST_CLIPPED:g}: so many samples are clipped by {cause} "
        f"before any update{size}; {', '.join(ways).removeprefix('or ')}."
    )


def _fault(metrics: Metrics, name: str, over: float) -> str:
    """Says whether the mismatch is more than noise."""
    if over <= FAULT:
        return ""
    mean = _finite(metrics, "logprob_abs_diff_mean")
    size = f" ({mean[1]:.2g} on average)" if mean else ""
    return (
        f"{name} is {over:.4g}, above {FAULT:g}: before any update, rollout and training graph "
        f"differ by more than their precisions explain{size}. The engine samples with other "
        "settings, roundings or weights than it should; flowgrpo-rc calibrate with the same "
        "settings looks for the cause."
    )


def _unquantized(name: str, over: float, share: float) -> str:
    """Says whether a quantization is missing."""
    bound = max(UNQUANTIZED * share, LEAST_BOUND)
    if over >= bound:
        return ""
    return (
        f"{name} is {over:.4g}, below {bound:.2g}: rollout and training graph differ by less than "
        "rollout.quantization makes them differ. The engine seems to sample with plain weights; "
        "see whether it applies the quantization."
    )


def _gamed(metrics: Metrics, drift: float, gain: float, pictures: PictureWatch) -> str:
    """Says whether reward and pictures have moved together."""
    if drift <= DRIFT or gain < GAIN:
        return ""
    return (
        f"pictures/drift is {drift:.4g}, above {DRIFT:g}, while the reward has risen by "
        f"{gain:.2g} of its standard deviation: {pictures.most_moved(metrics)} has moved most. "
        "Look at the samples: if they have become worse, the reward is gamed; add a second reward, "
        "set actor.use_kl_loss=true, or lower actor.optim.lr."
    )


class HealthMonitor:
    """Warns when a rule starts to hold, once, and again only after a whole window without it.

    A rule has to hold in a majority of the last `window` steps that report its metric; a value that
    is not finite is reported at once. The state goes into the checkpoint, so a resumed run warns
    like an uninterrupted one.

    Args:
      config: settings of the correction.
      window: number of steps that a majority is taken of.
      text: whether a language model is trained.
      fresh: whether the weights that are trained made the samples.
      unquantized: `unquantized_share` of the rollout; None without a quantization.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        window: int = 5,
        *,
        text: bool = False,
        fresh: bool = True,
        unquantized: float | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"HealthMonitor: window is {window}, and must be at least 1")
        self._setup = Setup.of(config)
        self._samples = _Samples(text, fresh, unquantized)
        self._window = window
        self._history: dict[str, deque[bool]] = {}
        self._active: set[str] = set()
        self._pictures = PictureWatch()
        self._guards = Guards()
        self._step = -1

    def compare(self, metrics: Metrics) -> dict[str, float]:
        """Returns how far pictures and reward have moved since the first step; see PictureWatch."""
        return self._pictures.compare(metrics)

    def update(self, step: int, metrics: Metrics) -> list[str]:
        """Returns the warnings that begin with this step; one that was judged before has none."""
        if step <= self._step:
            return []
        self._step = step
        found = [*_findings(metrics, self._setup, self._samples)]
        drift, gain = metrics.get("pictures/drift"), metrics.get("pictures/reward_gain")
        if drift is not None and gain is not None:
            gamed = _gamed(metrics, drift, gain, self._pictures)
            found.append(_Finding("gamed", gamed, immediate=False))
        found += [_Finding(name, text, True) for name, text in self._guards.judge(metrics)]
        return [message for finding in found if (message := self._onset(finding))]

    def _onset(self, finding: _Finding) -> str:
        history = self._history.setdefault(finding.rule, deque(maxlen=self._window))
        history.append(bool(finding.message))
        if len(history) == self._window and not any(history):
            self._active.discard(finding.rule)
        sustained = finding.immediate or sum(history) > self._window / 2
        if not finding.message or not sustained or finding.rule in self._active:
            return ""
        self._active.add(finding.rule)
        if finding.immediate or self._window == 1:
            return finding.message
        return f"{finding.message[:-1]} ({sum(history)} of the last {len(history)} steps)."

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; JSON can hold it."""
        history = {
            rule: [int(held) for held in steps] for rule, steps in sorted(self._history.items())
        }
        return {
            "step": self._step,
            "history": history,
            "active": sorted(self._active),
            "pictures": self._pictures.state_dict(),
            "guards": self._guards.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned."""
        self._step = int(state["step"])
        self._active = set(state["active"])
        if "pictures" in state:  # else an older version wrote it, and the next step is the base
            self._pictures.load_state_dict(state["pictures"])
        if "guards" in state:  # else an older version wrote it
            self._guards.load_state_dict(state["guards"])
        self._history = {
            rule: deque((bool(held) for held in steps), maxlen=self._window)
            for rule, steps in state["history"].items()
        }

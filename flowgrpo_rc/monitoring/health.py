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
from flowgrpo_rc.monitoring.health_rules import RULES, Setup, narrow_the_gap
from flowgrpo_rc.monitoring.mismatch import advised_clip_ratio
from flowgrpo_rc.monitoring.pictures import PictureWatch

DECOUPLED_PREFIX = "rollout_corr/"
BYPASS_PREFIX = "actor/rollout_corr/"


@dataclass(frozen=True, slots=True)
class _Finding:
    """One rule applied to one step; `message` is None if the rule does not hold."""

    rule: str
    message: str | None
    immediate: bool


class _Samples(NamedTuple):
    """Says what the samples of a step are.

    Attributes:
      text: whether they are responses of a language model, and not images.
      fresh: whether the weights that are trained made them, and not older ones.
      unquantized: `unquantized_share` of the rollout; None without a quantization.
    """

    text: bool
    fresh: bool
    unquantized: float | None = None


MOST_CLIPPED = 0.3  # share of the differences that may lie outside the clip band
FAULT = 2.0  # mismatch over what the precisions explain, from which on it is a fault
# Below this multiple of what is left without a quantization, the quantization is not applied; only
# a quantization that makes the mismatch so much larger can be judged by it.
UNQUANTIZED = 2.0
LARGEST_SHARE = 0.25
LEAST_BOUND = 0.1  # where nothing is left without it
DRIFT = 3.0  # how far pictures may move, in standard deviations between those of the base
GAIN = 0.25  # from which rise of the reward on this is held against them, in its own ones


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
    metrics: Mapping[str, float | None],
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
    return Health(tuple(finding.message for finding in found if finding.message is not None))


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


def _findings(
    metrics: Mapping[str, float | None], setup: Setup, samples: _Samples
) -> Iterator[_Finding]:
    yield _Finding("non_finite", _non_finite(metrics, setup), immediate=True)
    fault = _fault(metrics)
    # What a fault makes the clip do is no noise, and a wider band is not the answer.
    noise = None if fault else _noise(metrics, setup, samples)
    unquantized = _unquantized(metrics, samples)
    for kind, sentence, immediate in (
        ("noise", noise, False),
        ("fault", fault, not samples.text),  # a few unlikely tokens can double the mean of a step
        ("unquantized", unquantized, True),
    ):
        if sentence is not None:
            yield _Finding(kind, sentence or None, immediate)
    for rule in RULES:
        if fault and rule.name == "clipping":
            continue
        name: str | None = rule.metric
        if rule.metric not in metrics:
            name = correction_metric_name(metrics, rule.metric)
        value = None if name is None else metrics[name]
        if value is None or not math.isfinite(value):
            continue
        message = None
        crossed = rule.judge(value, setup)
        if crossed is not None:
            message = f"{name} is {value:.4g}, {crossed}: {rule.advice(setup)}."
        yield _Finding(rule.name, message, rule.immediate)


def _non_finite(metrics: Mapping[str, float | None], setup: Setup) -> str | None:
    """Judges what training computes; a reward or a timing cannot ruin the weights."""
    names = [
        name
        for name, value in sorted(metrics.items())
        if name.startswith((DECOUPLED_PREFIX, "actor/"))
        and (value is None or not math.isfinite(value))
    ]
    if not names:
        return None
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    measured = metrics[names[0]]
    shown = "" if measured is None else f" but {measured}"
    return (
        f"{names[0]}{others} is not finite{shown}: lower actor.optim.lr, or "
        f"{narrow_the_gap(setup)}."
    )


def _noise(metrics: Mapping[str, float | None], setup: Setup, samples: _Samples) -> str | None:
    """Says whether the clip acts before any update; "" if it does not, None if nobody can tell."""
    name = correction_metric_name(metrics, "pre_update_clip_fraction")
    clipped = _finite(metrics, "pre_update_clip_fraction")
    if clipped is None:
        return None
    if clipped <= MOST_CLIPPED:
        return ""
    over = _finite(metrics, "mismatch_over_clip")
    p99 = _finite(metrics, "logprob_abs_diff_p99")
    size = ""
    if over is not None:
        size = f", and half of them differ by {over:.2g} times the clip band or more"
    widen = "a wider clip band"
    if over is not None and p99 is not None:
        key = f"{DIFFUSION_KEY}.clip_ratio"
        if samples.text:
            key = f"{TOKEN_KEY}.clip_ratio_low and clip_ratio_high"
        widen = f"{key} >= {advised_clip_ratio(p99):g} (99% differ by less than {p99:.2g})"
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


def _fault(metrics: Mapping[str, float | None]) -> str | None:
    """Says whether the mismatch is more than noise; "" if not, None if nobody can tell."""
    name = correction_metric_name(metrics, "mismatch_over_expected")
    over = _finite(metrics, "mismatch_over_expected")
    if over is None:
        return None
    if over <= FAULT:
        return ""
    mean = _finite(metrics, "logprob_abs_diff_mean")
    size = "" if mean is None else f" ({mean:.2g} on average)"
    return (
        f"{name} is {over:.4g}, above {FAULT:g}: before any update, rollout and training graph "
        f"differ by more than their precisions explain{size}. The engine samples with other "
        "settings, roundings or weights than it should; flowgrpo-rc calibrate with the same "
        "settings looks for the cause."
    )


def _unquantized(metrics: Mapping[str, float | None], samples: _Samples) -> str | None:
    """Says whether a quantization is missing; "" if not, None if nobody can tell."""
    name = correction_metric_name(metrics, "mismatch_over_expected")
    over = _finite(metrics, "mismatch_over_expected")
    if over is None or samples.unquantized is None or samples.unquantized > LARGEST_SHARE:
        return None
    bound = max(UNQUANTIZED * samples.unquantized, LEAST_BOUND)
    if over >= bound:
        return ""
    return (
        f"{name} is {over:.4g}, below {bound:.2g}: rollout and training graph differ by less than "
        "rollout.quantization makes them differ. The engine seems to sample with plain weights; "
        "see whether it applies the quantization."
    )


def _gamed(metrics: Mapping[str, float | None], pictures: PictureWatch) -> str | None:
    """Says whether reward and pictures have moved together; "" if not, None if nobody can tell."""
    drift, gain = metrics.get("pictures/drift"), metrics.get("pictures/reward_gain")
    if drift is None or gain is None:
        return None
    if drift <= DRIFT or gain < GAIN:
        return ""
    return (
        f"pictures/drift is {drift:.4g}, above {DRIFT:g}, while the reward has risen by "
        f"{gain:.2g} of its standard deviation: {pictures.most_moved(metrics)} has moved most. "
        "Look at the samples: if they have become worse, the reward is gamed; add a second reward, "
        "set actor.use_kl_loss=true, or lower actor.optim.lr."
    )


def _finite(metrics: Mapping[str, float | None], name: str) -> float | None:
    full = correction_metric_name(metrics, name)
    value = None if full is None else metrics[full]
    return value if value is not None and math.isfinite(value) else None


class HealthMonitor:
    """Warns when a rule starts to hold, once, and again only after a whole window without it.

    A rule has to hold in a majority of the last `window` steps that report its metric; a value that
    is not finite is reported at once. The state goes into the checkpoint, so a resumed run warns
    like an uninterrupted one.
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
        """Parses the settings of the correction.

        Args:
          config: settings of the correction.
          window: number of steps that a majority is taken of.
          text: whether a language model is trained.
          fresh: whether the weights that are trained made the samples.
          unquantized: `unquantized_share` of the rollout; None without a quantization.
        """
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

    def compare(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Returns how far pictures and reward have moved since the first step; see PictureWatch."""
        return self._pictures.compare(metrics)

    def update(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """Returns the warnings that begin with this step; one that was judged before has none."""
        if step <= self._step:
            return []
        self._step = step
        found = [*_findings(metrics, self._setup, self._samples)]
        gamed = _gamed(metrics, self._pictures)
        if gamed is not None:
            found.append(_Finding("gamed", gamed or None, immediate=False))
        found += [_Finding(name, text, True) for name, text in self._guards.judge(metrics)]
        return [sentence for finding in found if (sentence := self._onset(finding)) is not None]

    def _onset(self, finding: _Finding) -> str | None:
        history = self._history.setdefault(finding.rule, deque(maxlen=self._window))
        history.append(finding.message is not None)
        if len(history) == self._window and not any(history):
            self._active.discard(finding.rule)
        sustained = finding.immediate or sum(history) > self._window / 2
        if finding.message is None or not sustained or finding.rule in self._active:
            return None
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

"""Judges whether the correction is healthy: what the rules say of a step, and when that is told.

A rule whose metric is absent is skipped: without importance weights, for example, there is no
largest one.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.metric_names import other_names
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.monitoring.guards import Guards
from flowgrpo_rc.monitoring.health_rules import FAULT, MOST_EQUAL, RULES, Setup
from flowgrpo_rc.monitoring.mismatch import round_up
from flowgrpo_rc.monitoring.pictures import PictureWatch

DECOUPLED_PREFIX = "rollout_corr/"
BYPASS_PREFIX = "actor/rollout_corr/"

_MOST = 0.5  # share of the groups that most of them are
_CONSTANT = 1e-6  # a standard deviation below that share of its mean is rounding
_WINDOW = 5  # steps that a majority is taken of
DRIFT = 3.0  # how far pictures may move, in standard deviations between those of the base
GAIN = 0.25  # from which rise of the reward on this is held against them, in its own ones

Metrics = Mapping[str, float | None]


class _Finding(NamedTuple):
    """One rule applied to one step; `message` is "" if the rule does not hold."""

    rule: str
    message: str
    immediate: bool


@dataclass(frozen=True, slots=True)
class Health:
    """What the rules say of a step; true if healthy.

    A warning is one sentence for each rule that holds, with the measured value, its threshold and
    the key to change.
    """

    warnings: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.warnings


def check_rollout_correction_health(
    metrics: Metrics, config: RolloutCorrectionConfig, *, text: bool = False, fresh: bool = True
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
    setup = Setup.of(config, config.rules(), text=text, fresh=fresh, unquantized=None)
    findings = _findings(metrics, setup)
    return Health(tuple(finding.message for finding in findings if finding.message))


def correction_metric_name(metrics: Mapping[str, object], name: str) -> str | None:
    """Finds the full name, verl's or slime's, under which metrics hold verl's `name`; else None."""
    prefixes = (DECOUPLED_PREFIX, BYPASS_PREFIX)
    candidates = (prefix + known for known in other_names(name) for prefix in prefixes)
    return next((candidate for candidate in candidates if candidate in metrics), None)


def _finite(metrics: Metrics, name: str) -> tuple[str, float] | None:
    """Returns the full name and the value of a metric; None if it is absent or not finite."""
    full = name if name in metrics else correction_metric_name(metrics, name)
    value = None if full is None else metrics[full]
    return (full, value) if full and value is not None and math.isfinite(value) else None


def _findings(metrics: Metrics, setup: Setup, step: float = math.inf) -> Iterator[_Finding]:
    yield _Finding("non_finite", _non_finite(metrics, setup), immediate=True)
    words = setup.words() | _measured(metrics, setup) | {"rejects": _rejects(metrics, setup)}
    is_fault = False
    for rule in RULES:
        named_value = _finite(metrics, rule.metric)
        # What a fault makes the clip do is no noise, and a wider band is not the answer.
        answered = is_fault and rule.name in ("noise", "clipping", "dilution")
        unclear = rule.name == "unquantized" and setup.unquantized is None
        if named_value is None or answered or unclear or step <= rule.after:
            continue
        name, value = named_value
        crossed = rule.judge(value, setup, words)
        is_fault = is_fault or (rule.name == "fault" and bool(crossed))
        # A few unlikely tokens can double the mean of a step.
        immediate = rule.immediate and not (rule.name == "fault" and setup.text)
        message = f"{name} is {value:.4g}, {crossed}." if crossed else ""
        yield _Finding(rule.name, message, immediate)


def _measured(metrics: Metrics, setup: Setup) -> dict[str, str]:
    """Returns words of the rules that depend on further metrics of the step."""
    mean = _finite(metrics, "logprob_abs_diff_mean")
    over = _finite(metrics, "mismatch_over_clip")
    p99 = _finite(metrics, "logprob_abs_diff_p99")
    widen = "a wider clip band"
    if over and p99 and p99[1] > 0:
        text_keys = f"{TOKEN_KEY}.clip_ratio_low and clip_ratio_high"
        keys = text_keys if setup.text else f"{DIFFUSION_KEY}.clip_ratio"
        advised = round_up(p99[1], 1)
        widen = f"{keys} >= {advised:g} (99% differ by less than {p99[1]:.2g})"
    ways = [f"set {setup.recompute}"] if setup.recompute else []
    ways.append(f"or take {widen}")
    if setup.fresh:
        latents = "" if setup.text else ", fp32 latents in the engine"
        ways.append(f"or a more precise rollout (rollout.dtype=fp32{latents})")
    half = "half of them differ by {:.2g} times the clip band or more"
    return {
        "mean": f" ({mean[1]:.2g} on average)" if mean else "",
        "half": f", and {half.format(over[1])}" if over else "",
        "ways": ", ".join(ways).removeprefix("or "),
        "equal": _why_equal(metrics, setup),
    }


def _why_equal(metrics: Metrics, setup: Setup) -> str:
    """Returns why the rewards of the groups are equal, and what helps."""
    names = ("advantages/single_ratio", "advantages/identical_ratio", "reward/mean", "reward/std")
    single, identical, mean, std = ((_finite(metrics, name) or ("", math.nan))[1] for name in names)
    nothing = "the samples of a prompt all have one reward, so that nothing is learnt:"
    noise = "rollout.temperature" if setup.text else "rollout.algo.noise_level"
    if single > _MOST:
        return (
            "one sample of a prompt at most has a reward, which leaves nothing to compare: look at "
            "reward/failed_fraction and at the first failure in the log, or lower what rejects"
        )
    if std <= _CONSTANT * abs(mean) and not identical > MOST_EQUAL:
        return (
            f"{nothing} the reward is {mean:.4g} for every sample of every prompt; see whether it "
            "looks at the sample, or give another one in reward.terms"
        )
    if identical > _MOST:
        return f"{nothing} they are identical; raise {noise}, or look at the engine"
    return (
        f"{nothing} its samples differ, and so do rewards of different prompts; raise rollout.n or "
        f"{noise}, or give prompts that are neither too hard nor too easy"
    )


def _rejects(metrics: Metrics, setup: Setup) -> str:
    """Returns what it means that a band rejects much, which the size of the mismatch tells."""
    over = _finite(metrics, "mismatch_over_expected")
    words = setup.words()
    widen = "widen {band}".format(**words)
    look = "{narrow}, and leave the band as it is: flowgrpo-rc calibrate looks for the cause"
    if over is None:
        return (
            f"the band is tight, or the rollout drifts away; {widen} if mismatch_over_expected is "
            f"about 1, else {look.format(**words)}"
        )
    if over[1] <= FAULT:
        return f"the mismatch is what the precisions explain, so the band is too tight; {widen}"
    return f"the rollout drifts away from the training graph; {look.format(**words)}"


def _non_finite(metrics: Metrics, setup: Setup) -> str:
    """Judges what training computes; a reward or a timing cannot ruin the weights."""
    trained = [name for name in sorted(metrics) if name.startswith((DECOUPLED_PREFIX, "actor/"))]
    names = [name for name in trained if _finite(metrics, name) is None]
    if not names:
        return ""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    measured = metrics[names[0]]
    shown = "" if measured is None else f" but {measured}"
    narrow = setup.words()["narrow"]
    return f"{names[0]}{more} is not finite{shown}: lower actor.optim.lr, or {narrow}."


def _gamed(metrics: Metrics, drift: float, gain: float, pictures: PictureWatch) -> str:
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

    A rule has to hold in a majority of the last five steps that report its metric; a value that is
    not finite is reported at once. The state goes into the checkpoint, so a resumed run warns like
    an uninterrupted one.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
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
        findings = [*_findings(metrics, self._setup, step)]
        drift = metrics.get("pictures/drift")
        gain = metrics.get("pictures/reward_gain")
        if drift is not None and gain is not None:
            gamed = _gamed(metrics, drift, gain, self._pictures)
            findings.append(_Finding("gamed", gamed, immediate=False))
        findings += [_Finding(name, text, True) for name, text in self._guards.judge(metrics)]
        return [message for finding in findings if (message := self._onset(finding))]

    def _onset(self, finding: _Finding) -> str:
        history = self._history.setdefault(finding.rule, deque(maxlen=_WINDOW))
        history.append(bool(finding.message))
        if len(history) == _WINDOW and not any(history):
            self._active.discard(finding.rule)
        sustained = finding.immediate or sum(history) > _WINDOW / 2
        if not finding.message or not sustained or finding.rule in self._active:
            return ""
        self._active.add(finding.rule)
        if finding.immediate:
            return finding.message
        return f"{finding.message[:-1]} ({sum(history)} of the last {len(history)} steps)."

    def state_dict(self) -> dict[str, object]:
        """Returns the state; JSON can hold it."""
        return {
            "step": self._step,
            "history": {rule: [*map(int, held)] for rule, held in sorted(self._history.items())},
            "active": sorted(self._active),
            "pictures": self._pictures.state_dict(),
            "guards": self._guards.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned."""
        self._step = int(state["step"])
        self._active = set(state["active"])
        self._pictures.load_state_dict(state["pictures"])
        self._guards.load_state_dict(state["guards"])
        self._history = {
            rule: deque(map(bool, held), maxlen=_WINDOW) for rule, held in state["history"].items()
        }

"""Is the correction still healthy? Thresholds on a step's metrics, and a monitor that warns once
per onset.

The thresholds are those of the rollout-correction documents:
https://verl.readthedocs.io/en/latest/algo/rollout_corr.html and its diffusion counterpart. A rule
whose metric is absent is skipped. A metric is absent, for example, when no importance weights are
computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flowgrpo_rc.correction.metric_names import other_names
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.monitoring.mismatch import advised_clip_ratio

DECOUPLED_PREFIX = "rollout_corr/"
BYPASS_PREFIX = "actor/rollout_corr/"

_KEY = "algorithm.rollout_correction"


class CorrectionSettings(Protocol):
    """What the rules read of a RolloutCorrectionConfig."""

    @property
    def bypass_mode(self) -> bool: ...

    @property
    def rollout_is(self) -> str | None: ...

    @property
    def rollout_is_threshold(self) -> Any: ...

    @property
    def rollout_rs(self) -> Any: ...

    @property
    def normalize(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """`judge` returns the threshold that was crossed, in words, or None. `advice` is the rest of
    the sentence.
    immediate: one step is enough, since the metric cannot waver."""

    name: str
    metric: str
    judge: Callable[[float, CorrectionSettings], str | None]
    advice: Callable[[CorrectionSettings], str]
    immediate: bool = False


@dataclass(frozen=True, slots=True)
class _Finding:
    """One rule applied to one step: `message` is None where the rule does not hold."""

    rule: str
    message: str | None
    immediate: bool


def _above(bound: float) -> Callable[[float, CorrectionSettings], str | None]:
    return lambda value, _: f"above {bound:g}" if value > bound else None


def _below(bound: float) -> Callable[[float, CorrectionSettings], str | None]:
    return lambda value, _: f"below {bound:g}" if value < bound else None


def _outside(lower: float, upper: float) -> Callable[[float, CorrectionSettings], str | None]:
    return lambda value, _: None if lower <= value <= upper else f"outside [{lower:g}, {upper:g}]"


def _pinned_at_bound(value: float, config: CorrectionSettings) -> str | None:
    bound = _upper_weight_bound(config)
    # A weight that was clamped in fp32 may come back a rounding error below the bound.
    return (
        f"at or above its bound {bound:g}"
        if bound is not None and value >= bound * (1 - 1e-6)
        else None
    )


def _upper_weight_bound(config: CorrectionSettings) -> float | None:
    """None without importance weights or where the bound is found while running; "lower_upper"
    gives upper.
    """
    threshold = str(config.rollout_is_threshold)
    if config.rollout_is is None or threshold.startswith("auto"):
        return None
    return float(threshold.split("_")[-1])


def _narrow_the_gap(config: CorrectionSettings) -> str:
    precision = "raise the precision of the rollout (rollout.dtype)"
    return f"{precision} or set {_KEY}.bypass_mode=False" if config.bypass_mode else precision


def _drift(config: CorrectionSettings) -> str:
    return (
        f"the rollout drifts away from the training graph; {_narrow_the_gap(config)}, or "
        f"tighten {_band(config)}"
    )


def _diluted(value: float, config: CorrectionSettings) -> str | None:
    """Only where rejected steps stay in the denominator."""
    return None if config.normalize == "kept" else _above(0.10)(value, config)


def _dilution(config: CorrectionSettings) -> str:
    widen = f"widen {_band(config)}, or set {_KEY}.normalize=kept"
    return f"rejected samples stay in the mean and dilute the gradient; {widen}"


def _band(config: CorrectionSettings) -> str:
    criterion = f" of {config.rollout_rs}" if config.rollout_rs else ""
    return f"{_KEY}.rollout_rs_threshold{criterion}"


_SPREAD = (
    f"few samples carry the gradient; lower {_KEY}.rollout_is_threshold or set "
    f"{_KEY}.rollout_is=token"
)


def _clipping(reason: str) -> Callable[[CorrectionSettings], str]:
    widen = (
        "raise actor.diffusion_loss.clip_ratio (for text actor.token_loss.clip_ratio_low and "
        "clip_ratio_high)"
    )
    return lambda config: (
        f"{reason}; {f'set {_KEY}.bypass_mode=False or ' if config.bypass_mode else ''}{widen}"
    )


_RULES = (
    _Rule(name="drift", metric="rollout_rs_seq_masked_fraction", judge=_above(0.05), advice=_drift),
    _Rule(
        name="dilution", metric="rollout_rs_seq_masked_fraction", judge=_diluted, advice=_dilution
    ),
    _Rule(
        name="log_ppl",
        metric="log_ppl_abs_diff",
        judge=_above(1.0),
        advice=lambda config: (
            f"rollout and training disagree about the same samples; {_narrow_the_gap(config)}"
        ),
    ),
    _Rule(
        name="is_max",
        metric="rollout_is_max",
        judge=_pinned_at_bound,
        advice=lambda config: (
            f"weights are cut there; {_narrow_the_gap(config)}, or raise "
            f"{_KEY}.rollout_is_threshold"
        ),
    ),
    _Rule(
        name="is_mean",
        metric="rollout_is_mean",
        judge=_outside(0.5, 2.0),
        advice=lambda config: (
            "the shift is systematic; check that rollout.calculate_log_probs=True and the "
            "sampler's settings "
            f"agree on both sides, and {_narrow_the_gap(config)}"
        ),
    ),
    _Rule(
        name="veto",
        metric="rollout_is_veto_fraction",
        judge=_above(0.1),
        advice=lambda config: (
            f"single steps are far off; {_narrow_the_gap(config)}, or lower "
            f"{_KEY}.rollout_token_veto_threshold"
        ),
    ),
    _Rule(
        name="ess", metric="rollout_is_eff_sample_size", judge=_below(0.3), advice=lambda _: _SPREAD
    ),
    _Rule(name="is_std", metric="rollout_is_std", judge=_above(1.0), advice=lambda _: _SPREAD),
    _Rule(
        name="kl",
        metric="kl",
        judge=_outside(-0.1, 0.1),
        advice=lambda config: (
            f"the policies are far apart; {_narrow_the_gap(config)}, or lower actor.optim.lr"
        ),
    ),
    _Rule(
        name="chi2",
        metric="chi2_token",
        judge=_above(1.0),
        advice=lambda config: f"the weights' variance is unusable; {_narrow_the_gap(config)}",
    ),
    _Rule(
        name="clipping",
        metric="actor/clip_fraction",
        judge=_above(0.5),
        advice=_clipping("more than half of the steps are clipped and teach nothing"),
    ),
    _Rule(
        name="rounded_latents",
        metric="rollout/latents_16bit_fraction",
        judge=_above(0.5),
        advice=lambda _: (
            "the engine stores latents in 16 bits, so that log-probs are those of other states; "
            "keep fp32"
        ),
        immediate=True,
    ),
)


class _Samples(NamedTuple):
    """Of a language model; of the weights that are trained."""

    text: bool
    fresh: bool


# Of the differences outside the clip band; the size of a fault, in multiples of what the precisions
# explain.
MOST_CLIPPED, FAULT = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class Health:
    """True if healthy. warnings: one sentence per rule that holds, with the measured value, its
    threshold and the key to change."""

    warnings: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.warnings


def check_rollout_correction_health(
    metrics: Mapping[str, float | None],
    config: CorrectionSettings,
    *,
    text: bool = False,
    fresh: bool = True,
) -> Health:
    """Whether a step's correction metrics look healthy.

    metrics: of one step, under `rollout_corr/` (decoupled) or `actor/rollout_corr/` (bypass). None
        stands for a value that was not finite, as in metrics.jsonl.
    text: a language model is trained; fresh: on samples of the weights that are trained, not of
        older ones.
    """
    found = _findings(metrics, config, _Samples(text, fresh))
    return Health(tuple(finding.message for finding in found if finding.message is not None))


def correction_metric_name(metrics: Mapping[str, Any], name: str) -> str | None:
    """The full name under which `metrics` holds the correction metric `name`, verl's or slime's, or
    None.
    """
    candidates = [
        prefix + known
        for known in other_names(name)
        for prefix in (DECOUPLED_PREFIX, BYPASS_PREFIX)
    ]
    return next((candidate for candidate in candidates if candidate in metrics), None)


def _findings(
    metrics: Mapping[str, float | None], config: CorrectionSettings, samples: _Samples
) -> Iterator[_Finding]:
    yield _Finding("non_finite", _non_finite(metrics, config), immediate=True)
    fault = _fault(metrics)
    # What a fault makes the clip do is no noise, and a wider band is not the answer.
    noise = None if fault else _noise(metrics, config, samples)
    for kind, sentence, immediate in (("noise", noise, False), ("fault", fault, True)):
        if sentence is not None:
            yield _Finding(kind, sentence or None, immediate)
    for rule in _RULES:
        if fault and rule.name == "clipping":
            continue
        name = (
            rule.metric if rule.metric in metrics else correction_metric_name(metrics, rule.metric)
        )
        value = None if name is None else metrics[name]
        if value is not None and math.isfinite(value):
            crossed = rule.judge(value, config)
            message = (
                None
                if crossed is None
                else f"{name} is {value:.4g}, {crossed}: {rule.advice(config)}."
            )
            yield _Finding(rule.name, message, rule.immediate)


def _non_finite(metrics: Mapping[str, float | None], config: CorrectionSettings) -> str | None:
    """Judges what training computes (`actor/`, `rollout_corr/`): a reward or a timing cannot ruin
    the weights.
    """
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
        f"{_narrow_the_gap(config)}."
    )


def _noise(
    metrics: Mapping[str, float | None], config: CorrectionSettings, samples: _Samples
) -> str | None:
    """Whether the clip acts before any update: a sentence, empty if it does not, None where it
    cannot be told.
    """
    name = correction_metric_name(metrics, "pre_update_clip_fraction")
    clipped = _finite(metrics, "pre_update_clip_fraction")
    if clipped is None or clipped <= MOST_CLIPPED:
        return None if clipped is None else ""
    over, p99 = _finite(metrics, "mismatch_over_clip"), _finite(metrics, "logprob_abs_diff_p99")
    size = (
        ""
        if over is None
        else f", and half of them differ by {over:.2g} times the clip band or more"
    )
    widen = "a wider clip band"
    if over is not None and p99 is not None:
        key = (
            f"{TOKEN_KEY}.clip_ratio_low and clip_ratio_high"
            if samples.text
            else f"{DIFFUSION_KEY}.clip_ratio"
        )
        widen = f"{key} >= {advised_clip_ratio(p99):g} (99% differ by less than {p99:.2g})"
    ways = [f"set {_KEY}.bypass_mode=False"] if config.bypass_mode else []
    ways.append(f"or take {widen}")
    if samples.fresh:
        latents = "" if samples.text else ", fp32 latents in the engine"
        ways.append(f"or a more precise rollout (rollout.dtype=fp32{latents})")
    cause = "noise" if samples.fresh else "the age of their policy"
    return (
        f"{name} is {clipped:.4g}, above {MOST_CLIPPED:g}: so many samples are clipped by {cause} "
        "before any "
        f"update{size}; {', '.join(ways).removeprefix('or ')}."
    )


def _fault(metrics: Mapping[str, float | None]) -> str | None:
    """Whether the mismatch is more than noise; as `_noise`."""
    name, over = (
        correction_metric_name(metrics, "mismatch_over_expected"),
        _finite(metrics, "mismatch_over_expected"),
    )
    if over is None or over <= FAULT:
        return None if over is None else ""
    mean = _finite(metrics, "logprob_abs_diff_mean")
    size = "" if mean is None else f" ({mean:.2g} on average)"
    return (
        f"{name} is {over:.4g}, above {FAULT:g}: before any update, rollout and training graph "
        "differ by more than "
        f"their precisions explain{size}. The engine samples with other settings, roundings or "
        "weights than it "
        "should; flowgrpo-rc calibrate with the same settings looks for the cause."
    )


def _finite(metrics: Mapping[str, float | None], name: str) -> float | None:
    full = correction_metric_name(metrics, name)
    value = None if full is None else metrics[full]
    return value if value is not None and math.isfinite(value) else None


class HealthMonitor:
    """Warns when a rule starts to hold, once, and again only after a whole window without it.

    A rule has to hold in a majority of the last `window` steps that report its metric; a value that
    is not finite is reported at once. The state goes into the checkpoint, so that a resumed run
    warns like an uninterrupted one.

    text, fresh: as in `check_rollout_correction_health`.
    """

    def __init__(
        self, config: CorrectionSettings, window: int = 5, *, text: bool = False, fresh: bool = True
    ) -> None:
        if window < 1:
            raise ValueError(f"HealthMonitor: window is {window}, and must be at least 1")
        self._config, self._samples = config, _Samples(text, fresh)
        self._window = window
        self._history: dict[str, deque[bool]] = {}
        self._active: set[str] = set()
        self._step = -1

    def update(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """The warnings that begin with this step. A step that was already judged is ignored."""
        if step <= self._step:
            return []
        self._step = step
        found = _findings(metrics, self._config, self._samples)
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
        history = {
            rule: [int(held) for held in steps] for rule, steps in sorted(self._history.items())
        }
        return {"step": self._step, "history": history, "active": sorted(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._active = set(state["active"])
        self._history = {
            rule: deque((bool(held) for held in steps), maxlen=self._window)
            for rule, steps in state["history"].items()
        }

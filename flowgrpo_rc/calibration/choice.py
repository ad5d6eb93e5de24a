"""The rule that turns a measured mismatch into a mode, a bound of the loss and rejection bands.

Legend: B samples, T steps.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from flowgrpo_rc.calibration.measure import robust
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import DIFFUSION_KEY, steps_of
from flowgrpo_rc.monitoring.mismatch import round_up
from flowgrpo_rc.plugins import check_choice
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import RunSpec

MODES = ("auto", "bypass", "decoupled")
# The bound of bypass mode is this quantile of what the loss bounds, times the margin.
QUANTILE = 0.99
MARGIN = 1.25
# A bound that is wider than this times the recipe's no longer holds back what an update does.
WIDEST = 10.0
# A movement of ten floors, less three of noise, must still be clipped.
MOVEMENT = 7.0
CRITERION = "token_k1"
BAND = "auto:4"
# By bypass_mode: a key, the value of it that the mode refuses, and the value that takes its place.
REFUSED: dict[bool, Sequence[tuple[str, object, object]]] = {
    True: (
        (f"{KEY}.exclude_rejected", True, None),
        (f"{KEY}.rollout_is_batch_normalize", True, False),
        (f"{KEY}.rollout_is_mode", "mask", None),
    ),
    False: ((f"{KEY}.bypass_level", "window", "step"),),
}


class Bound(NamedTuple):
    """A key of `actor.diffusion_loss` that bounds a quantity at every step, as measured."""

    key: str  # without its section
    configured: float  # its value in the configuration
    reference: float  # its value in the published recipe
    what: str  # the quantity, in words
    sizes: Tensor  # the quantity before any update, [B, T] float64, not negative
    widest: float  # a wider bound no longer holds an update back
    on_mismatch: bool  # whether the quantity is the mismatch itself

    @property
    def within(self) -> float:
        """The 99th percentile of the sizes."""
        return torch.quantile(self.sizes.flatten(), QUANTILE).item()

    @property
    def needed(self) -> float:
        """A value above that, with a margin."""
        return round_up(MARGIN * self.within, 2)

    @property
    def fits(self) -> bool:
        """Whether such a value still holds back what an update does."""
        return self.needed <= max(self.reference, self.widest)

    def exceeded(self, value: float) -> float:
        """Returns the share of steps that this value of the key clips."""
        return (self.sizes > value).double().mean().item()


def bound_of(spec: RunSpec, differences: Tensor, measured: Evaluation) -> Bound | None:
    """Measures what the configured loss bounds; None if it clips nothing, or names no bound."""
    config, loss = spec.config, spec.step_loss
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        return None
    convention = config.rollout.algo.log_prob_convention
    centered = bool(config.algorithm.rollout_correction.centered)
    if centered:
        assert measured.centered is not None
        differences = measured.centered.double()
    steps = steps_of(loss, measured.gaussian, centered=centered)
    bound = loss.bound(differences, steps, convention=convention)
    if bound is None:
        return None
    if bound.is_kl:
        sizes = bound.values
        # A KL grows with the square of a movement.
        widest = MOVEMENT**2 * sizes.median().item()
    else:
        sizes = torch.expm1(bound.values).abs()
        widest = MOVEMENT * robust(bound.values)
    if not tolerates_mismatch(spec):
        widest = min(WIDEST * bound.reference, widest)
    assert not isinstance(bound.value, Tensor)  # only a run knows the bound of each step
    return Bound(
        key=bound.option,
        configured=bound.value,
        reference=bound.reference,
        what=bound.what,
        sizes=sizes,
        widest=widest,
        on_mismatch=loss.clip_band is not None and not centered,
    )


def tolerates_mismatch(spec: RunSpec) -> bool:
    """Returns whether the gradient in bypass mode is nearly right however large the mismatch is."""
    centered = bool(spec.config.algorithm.rollout_correction.centered)
    return centered or spec.step_loss.tolerates_mismatch


def carries(spec: RunSpec, bound: Bound | None) -> bool:
    """Returns whether bypass mode makes room for a mismatch, as `choose` would."""
    return bound is None or (bound.needed < 1 and (bound.fits or tolerates_mismatch(spec)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Holds what a calibration sets."""

    values: dict[str, Any]  # by key
    reason: str = ""  # why this mode, with the numbers that decided
    notes: Sequence[str] = ()  # further sentences for the user

    def extended(self, values: Mapping[str, object], note: str) -> "Settings":
        """Returns these settings with further ones, and a sentence about them."""
        return replace(self, values={**self.values, **values}, notes=[*self.notes, note])

    def yaml(self, header: Sequence[str]) -> str:
        """Returns a file of the group `calibration`, for `--config-dir OUT +calibration=NAME`."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, name = key.split(".")
            reduce(lambda node, key: node.setdefault(key, {}), path, tree)[name] = value
        lines = ["@package _global_", *header, self.reason, *self.notes]
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(tree, sort_keys=False)

    def applied(self, config: Config) -> Config:
        """Returns a copy of the configuration with these settings."""
        config = copy.deepcopy(config)
        for key, value in self.values.items():
            *path, name = key.split(".")
            section = vars(reduce(getattr, path, config))
            # An option of a loss out of the tree is no field.
            fields = section if name in section else section["options"]
            fields[name] = value
        return config


def check_modes(spec: RunSpec, mode: str) -> None:
    """Raises ValueError for a mode that the run cannot have; measures nothing."""
    config = spec.settings
    check_choice("--mode", mode, MODES)
    reinforces = config.algorithm.rollout_correction.loss_type == "reinforce"
    if mode == "decoupled" and reinforces:
        raise ValueError(
            f"--mode decoupled: {KEY}.loss_type=reinforce is of bypass mode; drop one of them"
        )
    for bypass_mode in (True,) if reinforces else (True, False):
        applied = _settings(config, bypass_mode, {}).applied(spec.given)
        check_settings(resolve(applied, spec.machine))


def choose(spec: RunSpec, bound: Bound | None, *, mode: str, doubt: str | None) -> Settings:
    """Chooses mode, bound and rejection.

    The mode is bypass if a bound above 99% of the sizes, with a margin, is sensible: at most
    `WIDEST` times the recipe's and at most `MOVEMENT` times the floor. Otherwise it is decoupled,
    whose ratio has no mismatch in it, with the recipe's bound. A centered log-ratio, and a loss
    that tolerates the mismatch, are in bypass mode however wide the bound is: the direction of
    their gradient is nearly right there, at no cost. `doubt` says why no room should be made for
    the mismatch, such as a fault that explains it.
    """
    config = spec.config
    if bound is None:
        return _without_bound(config, mode, doubt)
    possible = bound.needed < 1
    carried = mode == "auto" and doubt is None and carries(spec, bound)
    bypass = possible and (mode == "bypass" or carried)
    value = max(bound.reference, bound.needed) if bypass else bound.reference
    wide = f"wider than the {bound.widest:.1e} that is sure to hold an update back"
    if bypass:
        reason = f"a {bound.key} of {value:.1e} contains it"
        if doubt is not None:
            reason += f", though {doubt}"
        elif not bound.fits:
            reason += f", though it is {wide}"
    elif doubt is not None:
        reason = f"no room is made for it, since {doubt}"
    elif not possible:
        reason = f"no {bound.key} below 1 contains it"
    elif mode == "decoupled":
        reason = "asked for; its ratio holds no mismatch, so the bound is the reference's"
    else:
        reason = f"a {bound.key} of {bound.needed:.1e} would be {wide}"
    share = f"{100 * QUANTILE:g}% of {bound.what} is within {bound.within:.1e}"
    sentence = f"{'Bypass' if bypass else 'Decoupled'} mode: {share}; {reason}."
    notes = [] if bypass or doubt is not None else _advice(spec, fits=bound.fits)
    return _settings(config, bypass, {f"{DIFFUSION_KEY}.{bound.key}": value}, sentence, notes)


def _without_bound(config: Config, mode: str, doubt: str | None) -> Settings:
    """The settings of a loss that has no bound to make room with."""
    name = f"{DIFFUSION_KEY}.loss_mode={config.actor.diffusion_loss.loss_mode}"
    bypass = True
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        reason = f"Bypass mode: {KEY}.loss_type=reinforce needs it, and clips nothing."
    elif mode == "bypass":
        reason = f"Bypass mode: asked for; {name} bounds nothing."
    else:
        bypass = False
        reason = f"Decoupled mode: {name} has no bound that could make room for the mismatch."
    notes = [] if doubt is None else [f"See to the mismatch first: {doubt}."]
    return _settings(config, bypass, {}, reason, notes)


def _advice(spec: RunSpec, *, fits: bool) -> list[str]:
    """What decoupled mode leaves open."""
    loss = spec.config.actor.diffusion_loss
    if spec.config.algorithm.rollout_correction.centered:
        return []
    if spec.step_loss.tolerates_mismatch:
        return [
            f"Recomputed means take the correction away that loss_mode={loss.loss_mode} has in "
            f"bypass mode; {KEY}.centered=true keeps it."
        ]
    if fits:
        return []
    return [
        "Recomputed log-probs end the pull of the clip, but the gradient stays biased where the "
        f"mismatch is large; with {KEY}.centered=true, calibrated for bypass mode, its direction "
        "is nearly right."
    ]


def _settings(
    config: Config,
    bypass_mode: bool,
    bound: Mapping[str, float],
    reason: str = "",
    notes: Sequence[str] = (),
) -> Settings:
    """The settings of a mode; keys whose value the mode refuses are set back."""
    loss = config.actor.diffusion_loss
    correction = config.algorithm.rollout_correction
    values = {
        # What follows the mismatch in a run is a number here.
        **{f"{DIFFUSION_KEY}.{name}": vars(type(loss))[name] for name in loss.auto},
        **bound,
        f"{KEY}.bypass_mode": bypass_mode,
        f"{KEY}.centered": bool(correction.centered),
        f"{KEY}.rollout_rs": CRITERION,
        f"{KEY}.rollout_rs_threshold": BAND,
        f"{KEY}.rollout_rs_threshold_lower": None,
    }
    resets = []
    if bypass_mode != correction.bypass_mode:
        mode = "bypass" if bypass_mode else "decoupled"
        for key, refused, instead in REFUSED[bypass_mode]:
            if reduce(getattr, key.split("."), config) == refused:
                values[key] = instead
                resets.append(
                    f"{key}={_scalar(refused)} does not go with {mode} mode: the file sets "
                    f"{_scalar(instead)}; drop yours from the command line, which wins over the "
                    "file."
                )
    return Settings(values=values, reason=reason, notes=[*notes, *resets])


def _scalar(value: object) -> str:
    """A value as YAML writes it."""
    return json.dumps(value).strip('"')

"""The rule that turns a measured mismatch into a mode, a bound of the loss and rejection bands."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from flowgrpo_rc.calibration.measure import robust
from flowgrpo_rc.config.check_settings import check_settings
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.losses.base import DIFFUSION_KEY, DiffusionLoss
from flowgrpo_rc.losses.find import package_losses
from flowgrpo_rc.policies.base import Measured

MODES = ("auto", "bypass", "decoupled")
QUANTILE, MARGIN = (
    0.99,
    1.25,
)  # of what the loss bounds, and how far above it the bound of bypass mode is
WIDEST = 10.0  # times the reference: a wider bound no longer holds back what an update does
MOVEMENT = (
    7.0  # times the floor: a movement of ten floors, less three of noise, must still be clipped
)
CRITERION, BAND = "token_k1", "auto:4"
# By bypass_mode: key, a value of it that the mode refuses, and what it is in its place.
REFUSED: dict[bool, Sequence[tuple[str, Any, Any]]] = {
    True: (
        ("actor.old_log_probs", "recompute", "auto"),
        (f"{KEY}.exclude_rejected", True, None),
        (f"{KEY}.rollout_is_batch_normalize", True, False),
        (f"{KEY}.rollout_is_mode", "mask", None),
    ),
    False: ((f"{KEY}.bypass_level", "window", "step"),),
}


class Bound(NamedTuple):
    """What the loss compares with a key of its own at every step.

    key: of `actor.diffusion_loss`; configured: its value in the configuration; reference: its value
    in the published recipe; what: is compared, in words; sizes [B, T]: that before any update;
    widest: with more, the bound no longer holds an update back; on_mismatch: the sizes are those of
    the mismatch itself.
    """

    key: str
    configured: float
    reference: float
    what: str
    sizes: Tensor
    widest: float
    on_mismatch: bool

    @property
    def within(self) -> float:
        """What nearly all sizes are within."""
        return torch.quantile(self.sizes.flatten(), QUANTILE).item()

    def exceeded(self, value: float) -> float:
        """The share of steps that this value of the key clips."""
        return (self.sizes > value).double().mean().item()


def bound_of(config: Config, differences: Tensor, measured: Measured) -> Bound | None:
    """The bound of the configured loss, for a mismatch [B, T] float64 and the trainer's steps,
    which have a KL where the loss compares means. None for `reinforce`, which has none, and for a
    loss that names none."""
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        return None
    loss = config.actor.diffusion_loss.loss()
    convention = config.rollout.algo.log_prob_convention
    found = loss.bound(differences, measured.gaussian, convention=convention)
    if found is None:
        return None
    if found.is_kl:
        sizes = found.values
        widest = MOVEMENT**2 * sizes.median().item()  # a KL is the square of a movement
    else:
        sizes = torch.expm1(found.values).abs()
        widest = MOVEMENT * robust(found.values)
    if not loss.tolerates_mismatch:
        widest = min(WIDEST * found.reference, widest)
    return Bound(
        key=found.option,
        configured=found.value,
        reference=found.reference,
        what=found.what,
        sizes=sizes,
        widest=widest,
        on_mismatch=loss.clip_band is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """values: by key; reason: of the mode, with the numbers that decided; notes: what else to know,
    in sentences.
    """

    values: dict[str, Any]
    reason: str
    notes: Sequence[str]

    @property
    def bypass_mode(self) -> bool:
        mode: bool = self.values[f"{KEY}.bypass_mode"]
        return mode

    def yaml(self, header: Sequence[str]) -> str:
        """A file of the group `calibration`, for `--config-dir OUT +calibration=NAME`."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, name = key.split(".")
            reduce(lambda node, part: node.setdefault(part, {}), path, tree)[name] = value
        comments = [
            f"# {line}\n" for line in ("@package _global_", *header, self.reason, *self.notes)
        ]
        return "".join(comments) + yaml.safe_dump(tree, sort_keys=False)

    def applied(self, config: Config) -> Config:
        """A copy of the configuration with these settings."""
        config = copy.deepcopy(config)
        for key, value in self.values.items():
            *path, name = key.split(".")
            section: Any = reduce(getattr, path, config)
            if name in vars(section):
                setattr(section, name, value)
            else:  # an option of a loss out of the tree
                section.options[name] = value
        return config


def check_modes(config: Config, mode: str) -> None:
    """ValueError for a mode that the configuration cannot have, before anything is measured."""
    if mode not in MODES:
        raise ValueError(f"--mode {mode}: allowed are {', '.join(MODES)}")
    reinforces = config.algorithm.rollout_correction.loss_type == "reinforce"
    if mode == "decoupled" and reinforces:
        raise ValueError(
            f"--mode decoupled: {KEY}.loss_type=reinforce is of bypass mode; drop one of them"
        )
    for bypass_mode in (True,) if reinforces else (True, False):
        check_settings(_settings(config, bypass_mode, {}, "", []).applied(config))


def choose(config: Config, bound: Bound | None, *, mode: str, doubt: str | None) -> Settings:
    """The settings for what the mismatch makes of the loss's bound.

    Bypass mode where a bound that holds 99% of it, with a margin, is sensible: at most `WIDEST`
    times the reference, and at most `MOVEMENT` times the floor. Decoupled mode otherwise, with the
    reference's bound, since its ratio holds no mismatch. A loss that tolerates the mismatch is in
    bypass mode however wide its bound is: recomputed means take its correction away.

    doubt: why the mismatch is no noise to make room for. `mode` overrules the choice, not the
        numbers.
    """
    if bound is None:
        return _without_bound(config, mode, doubt)
    tolerant = config.actor.diffusion_loss.loss().tolerates_mismatch
    needed = up(MARGIN * bound.within)
    fits, possible = needed <= max(bound.reference, bound.widest), needed < 1
    bypass = possible and (
        mode == "bypass" or (mode == "auto" and doubt is None and (fits or tolerant))
    )
    value = max(bound.reference, needed) if bypass else bound.reference
    wide = f"wider than the {bound.widest:.1e} that is sure to hold an update back"
    if bypass:
        reason = f"a {bound.key} of {value:.1e} contains it"
        reason += (
            f", though {doubt}" if doubt is not None else "" if fits else f", though it is {wide}"
        )
    elif doubt is not None:
        reason = f"no room is made for it, since {doubt}"
    elif not possible:
        reason = f"no {bound.key} below 1 contains it"
    elif mode == "decoupled":
        reason = "asked for; its ratio holds no mismatch, so the bound is the reference's"
    else:
        reason = f"a {bound.key} of {needed:.1e} would be {wide}"
    name = "Bypass" if bypass else "Decoupled"
    sentence = (
        f"{name} mode: {100 * QUANTILE:g}% of {bound.what} is within {bound.within:.1e}; {reason}."
    )
    notes = [] if bypass or doubt is not None else _advice(config, fits=fits)
    return _settings(config, bypass, {f"{DIFFUSION_KEY}.{bound.key}": value}, sentence, notes)


def _without_bound(config: Config, mode: str, doubt: str | None) -> Settings:
    """The settings of a loss that has no bound to make room with."""
    notes = [] if doubt is None else [f"See to the mismatch first: {doubt}."]
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        reason = f"Bypass mode: {KEY}.loss_type=reinforce needs it, and clips nothing."
        return _settings(config, True, {}, reason, notes)
    name = f"{DIFFUSION_KEY}.loss_mode={config.actor.diffusion_loss.loss_mode}"
    if mode == "bypass":
        return _settings(config, True, {}, f"Bypass mode: asked for; {name} bounds nothing.", notes)
    reason = f"Decoupled mode: {name} has no bound that could make room for the mismatch."
    return _settings(config, False, {}, reason, notes)


def _advice(config: Config, *, fits: bool) -> list[str]:
    """What decoupled mode leaves to be wished."""
    loss = config.actor.diffusion_loss
    if loss.loss().tolerates_mismatch:
        return [
            f"Recomputed means take the correction away that loss_mode={loss.loss_mode} has in "
            "bypass mode (docs/evidence.md)."
        ]
    if fits or config.rollout.algo.log_prob_convention == "peers":
        return []
    return [
        "Recomputed log-probs end the pull of the clip, but the gradient stays biased where the "
        f"mismatch is large; that of {DIFFUSION_KEY}.loss_mode={name}, calibrated for bypass mode, "
        "is nearly right (docs/evidence.md)."
        for name, other in package_losses(DiffusionLoss).items()
        if other.tolerates_mismatch
    ]


def _settings(
    config: Config, bypass_mode: bool, bound: dict[str, float], reason: str, notes: Sequence[str]
) -> Settings:
    """Those of a mode, and what it refuses of the configuration put right."""
    values = {
        **bound,
        f"{KEY}.bypass_mode": bypass_mode,
        f"{KEY}.rollout_rs": CRITERION,
        f"{KEY}.rollout_rs_threshold": BAND,
        f"{KEY}.rollout_rs_threshold_lower": None,
    }
    mode, resets = "bypass" if bypass_mode else "decoupled", []
    if bypass_mode != config.algorithm.rollout_correction.bypass_mode:
        for key, refused, instead in REFUSED[bypass_mode]:
            if reduce(getattr, key.split("."), config) == refused:
                values[key] = instead
                resets.append(
                    f"{key}={_scalar(refused)} does not go with {mode} mode: the file sets "
                    f"{_scalar(instead)}; drop "
                    "yours from the command line, which wins over the file."
                )
    return Settings(values=values, reason=reason, notes=[*notes, *resets])


def _scalar(value: object) -> str:
    """As it is written."""
    return json.dumps(value).strip('"')


def up(value: float) -> float:
    """Two significant digits, rounded up."""
    nearest = float(f"{value:.1e}")
    digit = 10.0 ** (int(f"{value:e}".split("e")[1]) - 1)
    return nearest if nearest >= value else float(f"{nearest + digit:.1e}")

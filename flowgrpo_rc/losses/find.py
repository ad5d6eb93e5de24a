"""From a `loss_mode` to the loss: a file of this folder, or a class or function out of the tree."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import (
    CustomLoss,
    DiffusionLoss,
    LossBound,
    PolicyLoss,
    TokenLoss,
    clip_bound,
)
from flowgrpo_rc.plugins import available_plugins, build, did_you_mean, load_class, load_function

PACKAGE = "flowgrpo_rc.losses"


class LossSection(Protocol):
    """A section of the configuration that names a loss.

    Attributes:
      loss_mode: name of a file in this folder, `my_module.MyLoss` or `my_module:function`.
      options: options that only this loss has. Options that several losses share are fields of the
        section.
    """

    loss_mode: str
    options: dict[str, Any]


def is_function(loss_mode: str) -> bool:
    """Whether a `loss_mode` names a function and not a class."""
    return ":" in loss_mode


def make_loss(key: str, section: LossSection, base: type, shared: Sequence[str]) -> Any:
    """Builds the loss class that a section names.

    Args:
      key: the section's key, for messages.
      section: the settings.
      base: ImageLoss or TokenLoss.
      shared: fields of the section that are options of some losses. A loss gets those that its
        constructor has.

    Raises:
      ValueError: for an unknown loss, and for an option that the loss does not have, misses or
        refuses.
    """
    cls = find_class(key, section.loss_mode, base)
    names = option_names(cls)
    _check_own(key, section, [name for name in names if name not in shared])
    given = {name: vars(section)[name] for name in shared if name in names}
    return build(cls, given | section.options, key)


def find_class(key: str, loss_mode: str, base: type) -> type:
    """Returns the loss class called `loss_mode`; ValueError lists the allowed names."""
    names = available_plugins(PACKAGE, base)
    if "." not in loss_mode and loss_mode not in names:
        raise ValueError(
            f"{key}.loss_mode={loss_mode!r}: allowed are {', '.join(names)}, my_module.MyLoss and "
            "my_module:function (a loss of your own)"
        )
    try:
        return load_class(PACKAGE, loss_mode, base)
    except ValueError as error:
        raise ValueError(f"{key}.loss_mode: {error}") from error


def package_losses(base: type) -> dict[str, Any]:
    """Returns the loss classes of this folder by name; `base` is a class of losses."""
    names = available_plugins(PACKAGE, base)
    return {name: load_class(PACKAGE, name, base) for name in names}


def find_function(key: str, section: LossSection) -> CustomLoss:
    """Returns the function that a section names. ValueError if there is none, or if the section has
    options of its own, which only a class can have.
    """
    try:
        function = load_function(section.loss_mode)
    except ValueError as error:
        raise ValueError(f"{key}.loss_mode: {error}") from error
    _check_own(key, section, [])
    return function


def option_names(cls: type) -> list[str]:
    """Returns the options of a loss class: the parameters of its constructor."""
    return list(inspect.signature(cls).parameters)


def check_effects(
    key: str, section: LossSection, base: type, shared: Sequence[str], read: Sequence[str]
) -> None:
    """Raises ValueError for a setting without effect.

    Args:
      key: the section's key, for messages.
      section: the settings.
      base: ImageLoss or TokenLoss.
      shared: fields of the section that are options of some losses.
      read: those of them that the section's loss has.
    """
    for name in shared:
        value = vars(section)[name]
        default = vars(type(section))[name]
        if name not in read and value != default:
            losses = package_losses(base)
            having = [other for other, cls in losses.items() if name in option_names(cls)]
            raise ValueError(
                f"{key}.{name}={value} has no effect with {key}.loss_mode={section.loss_mode}: "
                f"drop it, or give its default where a file sets it, {key}.{name}={default:g}; "
                f"or set loss_mode={' or '.join(having)}"
            )


def _check_own(key: str, section: LossSection, own: Sequence[str]) -> None:
    """ValueError for an option that is not one of the loss's `own`, naming the nearest key."""
    keys = [*own, *(name for name in vars(section) if name != "options")]
    for name in section.options:
        if name not in own:
            raise ValueError(
                f"{key}.{name}: unknown option{did_you_mean(name, keys)}; allowed with "
                f"{key}.loss_mode={section.loss_mode} are {', '.join(keys)}"
            )


def diffusion_function(function: CustomLoss, settings: Any) -> DiffusionLoss:
    """Wraps a function as the loss of steps; it is told the section of the configuration."""
    return _DiffusionFunction(function, settings)


def token_function(function: CustomLoss, settings: Any) -> TokenLoss:
    """Wraps a function as the loss of tokens; it is told the section of the configuration."""
    return _TokenFunction(function, settings)


class _DiffusionFunction(DiffusionLoss):
    def __init__(self, function: CustomLoss, settings: Any) -> None:
        self._function = function
        self._settings = settings

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        return self._function(log_probs, old_log_probs, advantages, keep_mask, self._settings)

    def bound(
        self, mismatch: Tensor, gaussian: GaussianSteps | None, *, convention: str
    ) -> LossBound | None:
        return clip_bound(self._settings.clip_ratio, mismatch, convention)


class _TokenFunction(TokenLoss):
    def __init__(self, function: CustomLoss, settings: Any) -> None:
        self._function = function
        self._settings = settings

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, keep_mask: Tensor
    ) -> PolicyLoss:
        return self._function(log_probs, old_log_probs, advantages, keep_mask, self._settings)

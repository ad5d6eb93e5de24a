"""From a `loss_mode` to the loss: a file of this folder, or a class out of the tree."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from flowgrpo_rc.plugins import available_plugins, build, did_you_mean, load_class

PACKAGE = "flowgrpo_rc.losses"


class LossSection(Protocol):
    """A section of the configuration that names a loss; `options` are those that only this loss
    has.
    """

    loss_mode: str
    options: dict[str, Any]


def make_loss(key: str, section: LossSection, base: type, shared: Sequence[str]) -> Any:
    """Builds the loss class that a section names, a subclass of `base`; `key` is the section's.

    `shared` are fields of the section that are options of some losses. A loss gets those that its
    constructor has. ValueError for an unknown loss, and for an option that the loss does not have,
    misses or refuses.
    """
    cls = find_class(key, section.loss_mode, base)
    names = option_names(cls)
    _check_own(key, section, [name for name in names if name not in shared])
    options = {name: vars(section)[name] for name in shared if name in names}
    return build(cls, options | section.options, key)


def find_class(key: str, loss_mode: str, base: type) -> type:
    """Returns the loss class called `loss_mode`; ValueError lists the allowed names."""
    names = package_losses(base)
    if loss_mode in names:
        return names[loss_mode]
    if ":" in loss_mode or "." not in loss_mode:
        raise ValueError(
            f"{key}.loss_mode={loss_mode!r}: allowed are {', '.join(names)} and my_module.MyLoss "
            "(a class of your own)"
        )
    try:
        return load_class(PACKAGE, loss_mode, base)
    except ValueError as error:
        raise ValueError(f"{key}.loss_mode: {error}") from error


@cache  # a bound that is auto:k builds its loss anew for each forward
def package_losses(base: type) -> dict[str, type]:
    """Returns the loss classes of this folder by name; `base` is a class of losses."""
    names = available_plugins(PACKAGE, base)
    return {name: load_class(PACKAGE, name, base) for name in names}


@cache
def option_names(cls: type) -> tuple[str, ...]:
    """Returns the options of a loss class: the parameters of its constructor."""
    return tuple(inspect.signature(cls).parameters)


def check_effects(
    key: str, section: LossSection, base: type, shared: Sequence[str], read: Sequence[str]
) -> None:
    """Raises ValueError for a setting without effect.

    Of the `shared` fields, as in `make_loss`, the section's loss has those in `read`.
    """
    for name in shared:
        value = vars(section)[name]
        default = vars(type(section))[name]
        # The default may stand anywhere: a run's file has every key, whatever its loss.
        if name not in read and value != default:
            losses = package_losses(base)
            having = [other for other, cls in losses.items() if name in option_names(cls)]
            raise ValueError(
                f"{key}.{name}={value} has no effect with {key}.loss_mode={section.loss_mode}: "
                f"drop it, or give its default where a file sets it, {key}.{name}={default:g}; "
                f"or set loss_mode={' or '.join(having)}"
            )


def _check_own(key: str, section: LossSection, own_names: Sequence[str]) -> None:
    """ValueError for an option that is not one of the loss's own, naming the nearest key."""
    keys = [*own_names, *(name for name in vars(section) if name != "options")]
    for name in section.options:
        if name not in own_names:
            raise ValueError(
                f"{key}.{name}: unknown option{did_you_mean(name, keys)}; allowed with "
                f"{key}.loss_mode={section.loss_mode} are {', '.join(keys)}"
            )

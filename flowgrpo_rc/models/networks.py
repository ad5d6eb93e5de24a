"""The trained networks of a model: one transformer, or several that share the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    from diffusers import ModelMixin

T = TypeVar("T")

FIRST = "transformer"  # a pipeline's only transformer, or its first


class Networks(nn.Module):
    """Several transformers that are trained together, by component. It has no forward."""

    def __init__(self, transformers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(transformers)


def transformers(network: nn.Module) -> dict[str, ModelMixin]:
    """Returns a network's transformers by component, in order; one alone is `transformer`."""
    return dict(network.networks) if isinstance(network, Networks) else {FIRST: network}


def by_transformer(named: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Sorts values of a network's parameters: component -> name in its transformer -> value."""
    values: dict[str, dict[str, T]] = {}
    for name, value in named.items():
        component = FIRST
        parameter = name
        if name.startswith("networks."):  # where `Networks` keeps its transformers
            _, component, parameter = name.split(".", 2)
        values.setdefault(component, {})[parameter] = value
    return values


def others_in(named: Iterable[str]) -> list[str]:
    """Returns the transformers beside the first that names of parameters belong to."""
    return [component for component in by_transformer(dict.fromkeys(named)) if component != FIRST]

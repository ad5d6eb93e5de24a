"""The components of a pipeline, by what its model_index.json says of them."""

from importlib import import_module
from typing import Any

import diffusers

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.reading import blaming


def component_class(config: ModelConfig, name: str, library: str, class_name: str) -> type[Any]:
    """Returns the class of a component by model_index.json; ValueError if it cannot be read."""
    found: Any = getattr(import_module(library), class_name, None)
    is_class = isinstance(found, type)
    if not is_class:
        raise ValueError(
            f"model.path={config.path}: its {name} is {class_name}, and this installation's "
            f"{library} has no class of this name"
        )
    if issubclass(found, diffusers.ConfigMixin):
        where = f"model.path={config.path}: the settings of its {name}"
        with blaming(where):
            settings = found.load_config(config.location(), subfolder=name)
            unknown = found.extract_init_dict(settings)[1]
        for key, value in unknown.items():  # which diffusers would ignore
            if value not in (None, False, [], {}):
                raise ValueError(f"{where} have {key}={value!r}, which no {class_name} here knows")
    return found

"""Plug-ins without a registry: one module in a plug-in folder is one plug-in, found by the module's
name.

A plug-in out of the tree is named by its full path, `my_package.my_module.MyClass`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_class(package: str, name: str, base: type) -> type:
    """The plug-in class called `name`: the one in module `package.name`, or the class at a dotted
    path.

    The ending of a module such as `vllm_engine` may be left out. Raises ValueError for an unknown
    name (listing what there is), for a module that does not hold exactly one concrete subclass of
    `base`, and for a dotted path that leads to no such class.
    """
    if "." in name:
        return _class_at(name, base)
    modules = _module_names(package)
    if f"{name}_engine" in modules:
        name = f"{name}_engine"
    if name not in modules:
        available = available_plugins(package, base)
        raise ValueError(
            f"{package} has no plug-in {name!r}{did_you_mean(name, available)}; available: "
            f"{', '.join(available)}, "
            f"or the full path of a class, my_package.my_module.MyClass"
        )
    found = _concrete_subclasses(import_module(f"{package}.{name}"), base)
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ValueError(
            f"{package}.{name} must define one concrete subclass of {base.__name__}; it has: "
            f"{names}"
        )
    return found[0]


def available_plugins(package: str, base: type) -> list[str]:
    """The names that `load_class` knows in a package, sorted. Imports its modules."""
    names = sorted(_module_names(package))
    return [
        name
        for name in names
        if len(_concrete_subclasses(import_module(f"{package}.{name}"), base)) == 1
    ]


def build(cls: type[T], options: Mapping[str, object], where: str) -> T:
    """cls(**options). `where` is the configuration key that the options come from, such as
    `reward.terms.ocr`.

    Raises ValueError as `check_options` does, and for a value that the constructor refuses, always
    with the key.
    """
    check_options(cls, options, where)
    try:
        return cls(**options)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


def check_options(cls: type, options: Mapping[str, object], where: str) -> None:
    """ValueError for an option that the constructor does not have (naming the nearest), or
    misses.
    """
    parameters = inspect.signature(cls).parameters
    allowed = [name for name, parameter in parameters.items() if parameter.kind in _KEYWORD_KINDS]
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    for name in options:
        if name not in allowed and not takes_any:
            listed = ", ".join(allowed) or "none"
            raise ValueError(
                f"{where}.{name}: unknown option{did_you_mean(name, allowed)}; allowed: {listed}"
            )
    required = [name for name in allowed if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in options]
    if missing:
        raise ValueError(f"{where}: {cls.__name__} needs the option {', '.join(missing)}")


def load_function(path: str) -> Callable[..., Any]:
    """The function at `my_package.my_module:name`. ValueError for a path that leads to none."""
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ValueError(f"path={path!r}: write it as my_package.my_module:name")
    if not _exists(module_name):
        raise ValueError(
            f"path={path!r}: there is no module {module_name!r}; is its folder on PYTHONPATH?"
        )
    value = vars(import_module(module_name)).get(name)
    if not callable(value):
        raise ValueError(f"path={path!r}: {module_name} has no function {name!r}")
    return value


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or nothing if none is near."""
    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _module_names(package: str) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(import_module(package).__path__)}


def _concrete_subclasses(module: ModuleType, base: type) -> list[type]:
    """Public classes defined in the module itself; what it imports or keeps for itself (`_Name`) is
    left out.
    """
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _class_at(path: str, base: type) -> type:
    module_name, _, class_name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not _exists(module_name):
        raise ValueError(
            f"{path}: there is no module {module_name!r}; is its folder on PYTHONPATH?"
        )
    value = vars(import_module(module_name)).get(class_name)
    if not (inspect.isclass(value) and issubclass(value, base)):
        raise ValueError(f"{path} is not a subclass of {base.__module__}.{base.__name__}")
    if inspect.isabstract(value):
        raise ValueError(
            f"{path} is abstract: it lacks {', '.join(sorted(vars(value)['__abstractmethods__']))}"
        )
    return value


def _exists(module_name: str) -> bool:
    """False where the module or a package on the way to it is missing. A failing import inside them
    is not that.
    """
    try:
        return find_spec(module_name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        return False

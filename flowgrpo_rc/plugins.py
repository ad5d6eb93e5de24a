"""Plug-ins without a registry: each module in a plug-in folder is one, found by the module's name.

A plug-in outside of the package is named by its full path, `my_package.my_module.MyClass`.
"""

import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from shlex import quote
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_ENGINE = "_engine"
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_class(package: str, name: str, base: type) -> type:
    """Loads a plug-in class: of a module in the plug-in folder `package`, or by the full path of a
    class.

    The ending `_engine` of a module may be left out. ValueError lists the plug-ins that exist.
    """
    if "." in name:
        return _class_at(name, base)
    modules = _module_names(package)
    if f"{name}{_ENGINE}" in modules:
        name = f"{name}{_ENGINE}"
    if name not in modules:
        raise ValueError(f"{package} has {_no_plugin(name, available_plugins(package, base))}")
    classes = concrete_subclasses(import_module(f"{package}.{name}"), base)
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise ValueError(
            f"{package}.{name} must define one concrete subclass of {base.__name__}; it has: "
            f"{names}"
        )
    return classes[0]


def available_plugins(package: str, base: type) -> list[str]:
    """Lists the names that `load_class` knows in a package, sorted. Imports all its modules."""
    return [
        name
        for name in sorted(_module_names(package))
        if len(concrete_subclasses(import_module(f"{package}.{name}"), base)) == 1
    ]


def check_engine_name(package: str, name: str, key: str) -> None:
    """Checks the name of an engine without importing one, which would import its libraries."""
    names = _module_names(package)
    engines = sorted(module.removesuffix(_ENGINE) for module in names if module.endswith(_ENGINE))
    if "." not in name and name.removesuffix(_ENGINE) not in engines:
        raise ValueError(f"{key}={name}: there is {_no_plugin(name, engines)}")


def _no_plugin(name: str, available: Sequence[str]) -> str:
    return (
        f"no plug-in {name!r}{did_you_mean(name, available)}; available: {', '.join(available)}, "
        "or the full path of a class, my_package.my_module.MyClass"
    )


def build(cls: type[T], options: Mapping[str, object], where: str) -> T:
    """Returns `cls(**options)`; a ValueError names `where`, the key that the options come from."""
    check_options(cls, options, where)
    try:
        return cls(**options)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


def check_options(
    cls: type, options: Mapping[str, object], where: str, *, others: Sequence[str] = ()
) -> None:
    """Checks the names of options of `where` against a constructor; `others` are allowed there,
    too.
    """
    parameters = inspect.signature(cls).parameters
    allowed = [name for name, parameter in parameters.items() if parameter.kind in _KEYWORD_KINDS]
    kinds = [parameter.kind for parameter in parameters.values()]
    known = [*others, *allowed]
    for name in options if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if name not in allowed:
            listed = ", ".join(known) or "none"
            raise ValueError(
                f"{where}.{name}: unknown option{did_you_mean(name, known)}; allowed: {listed}"
            )
    required = [name for name in allowed if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in options]
    if missing:
        raise ValueError(f"{where}: {cls.__name__} needs the option {', '.join(missing)}")


def refuse(*cases: tuple[object, str], about: str = "", end: str = "") -> None:
    """Raises ValueError with the first reason that holds, of (holds, reason)."""
    for holds, reason in cases:
        if holds:
            raise ValueError(f"{about}{reason}{end}")


def check_choice(key: str, value: str | None, allowed: Iterable[str | None]) -> None:
    """Raises ValueError unless a setting has one of the allowed values; None is null."""
    if value not in allowed:
        listed = ", ".join("null" if choice is None else choice for choice in allowed)
        raise ValueError(f"{key}={value!r}: allowed are {listed}")


def check_least(key: str, value: float | None, least: float) -> None:
    """Raises ValueError if a setting is below the least that is allowed, or not finite."""
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{key}={value}: give at least {least}")


def check_that(holds: bool, message: str) -> None:
    """Raises ValueError with a message unless a setting is as it should be."""
    if not holds:
        raise ValueError(message)


def in_seconds(key: str, value: Any) -> Any:
    """Returns a value with each duration, such as 2h, 90m or 1h30m, as a number of seconds.

    Only keys of times may hold one: `max_time`, and those that end in `_s`. ValueError if such a
    key holds another text that begins with a digit.
    """
    if isinstance(value, Mapping):
        return {name: in_seconds(f"{key}.{name}", below) for name, below in value.items()}
    if not isinstance(value, str) or not key.endswith(("_s", ".max_time")) or "${" in value:
        return value
    terms = _DURATION.findall(value)
    if not value[:1].isdigit() or value.replace(".", "").isdigit():
        return value
    if "".join(map("".join, terms)) != value:
        raise ValueError(f"{key}={value!r}: give seconds, or a duration such as 2h, 90m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in terms)


def load_function(path: str) -> Callable[..., Any]:
    """Loads a function, or another callable, by its path `my_package.my_module:name`."""
    module_name, _, name = path.partition(":")
    if not all(word.isidentifier() for word in (*module_name.split("."), name)):
        raise ValueError(f"path={path!r}: write it as my_package.my_module:name")
    _check_module(module_name, f"path={path!r}")
    try:
        module = import_module(module_name)
    except Exception as error:  # the module is foreign code
        raise ValueError(
            f"path={path!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    value = vars(module).get(name)
    if not callable(value):
        raise ValueError(f"path={path!r}: {module_name} has no function {name!r}")
    return value


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra of pyproject.toml, by names of its own parts."""
    try:
        requirements = metadata.requires("flowgrpo-rc") or []
    except metadata.PackageNotFoundError:
        requirements = []
    split = [requirement.partition(";") for requirement in requirements]
    of_extra = [need.strip() for need, _, marker in split if _EXTRA.findall(marker) == [extra]]
    return f"pip install {' '.join(map(quote, of_extra or [f'flowgrpo-rc[{extra}]']))}"


def check_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raises ValueError if a package of an extra is missing; `what` needs it."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f"{what} needs {' and '.join(missing)}: {install_hint(extra)}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Returns ` (did you mean 'x'?)` with the nearest known name, or "" if none is near."""
    near = get_close_matches(name, known, n=1)
    if not near and len(name) > 2:
        near = sorted((word for word in known if name in word), key=len)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _module_names(package: str) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(import_module(package).__path__)}


def concrete_subclasses(module: ModuleType, base: type) -> list[type]:
    """Returns the public classes that a module itself defines, without those that it imports."""
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
    _check_module(module_name, path)
    value = vars(import_module(module_name)).get(class_name)
    is_subclass = inspect.isclass(value) and issubclass(value, base)
    lacking = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
    refuse(
        (value is None, f": {module_name} has no class {class_name!r}"),
        (not is_subclass, f" is not a subclass of {base.__module__}.{base.__name__}"),
        (lacking, f" is abstract: it lacks {lacking}"),
        about=path,
    )
    assert isinstance(value, type)
    return value


def _check_module(name: str, where: str) -> None:
    """Raises ValueError if there is no such module; what fails inside its packages still raises."""
    exists = all(word.isidentifier() for word in name.split("."))
    try:
        exists = exists and find_spec(name) is not None
    except ModuleNotFoundError as error:
        # find_spec imports the packages on the way. Only if one of these is the missing module,
        # the answer is no; otherwise one of them imports something that is not installed.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        exists = False
    if not exists:
        advice = "write it without .py" if name.endswith(".py") else "is its folder on PYTHONPATH?"
        raise ValueError(f"{where}: there is no module {name!r}; {advice}")

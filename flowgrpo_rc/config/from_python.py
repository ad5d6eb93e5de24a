"""Takes from Python what a command line gives: arguments, overrides by key, prompts, callbacks."""

import functools
import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.data.readers import PROMPT_FILES
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.plugins import did_you_mean, install_hint
from flowgrpo_rc.records.checkpoint import CheckpointError
from flowgrpo_rc.rewards.manager import RewardError

P = ParamSpec("P")
T = TypeVar("T")
Overrides = Sequence[str] | Mapping[str, object]
# Names that other libraries have for an argument.
_OTHER_NAMES = {"overrides": "config", "settings": "config", "args": "config"}
# A word that Hydra reads as the text that it is.
_PLAIN_TEXT = re.compile(r"(?!(null|true|false|inf|nan)$)[A-Za-z][\w/.:-]*", re.IGNORECASE)
# Key of prompts, and the part of a dataset of the Hub that is taken unless its id names one.
_SPLITS = {"data.train_files": "train", "data.val_files": "test"}
# A text of a list that is meant as a path, whether it is there or not.
_PATH = re.compile(r"[\w.~-]*/[\w./~-]*|[\w.-]+\.\w{1,8}")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::(.+))?")


def public_call(call: Callable[P, T]) -> Callable[P, T]:
    """Checks the names of arguments, and raises what is wrong input as one line, without causes."""
    known = [*inspect.signature(call).parameters]

    @functools.wraps(call)
    def called(*args: P.args, **keywords: P.kwargs) -> T:
        for name in keywords.keys() - known:
            near = did_you_mean(_OTHER_NAMES.get(name, name), known)
            raise TypeError(
                f"{call.__name__} has no argument {name!r}{near}; help({call.__name__}) lists them"
            )
        try:
            return call(*args, **keywords)
        except (ValueError, CheckpointError) as error:
            raise error.with_traceback(None) from None
        except RewardError as error:  # its cause is a line of the caller's own
            raise error.with_traceback(None) from error.__cause__

    return called


@contextmanager
def silent() -> Iterator[None]:
    """Leaves warnings meanwhile to the handlers that the caller has set up, if there are any."""
    package = logging.getLogger("flowgrpo_rc")
    handler = logging.NullHandler()
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


def check_callbacks(callbacks: object) -> None:
    """Raises ValueError unless all are functions that take a step and its metrics."""
    if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
        raise ValueError(f"callbacks={callbacks!r}: give a list of functions (step, metrics)")
    for callback in callbacks:
        try:
            inspect.signature(callback).bind(0, {})
        except TypeError as error:
            raise ValueError(f"callbacks: {callback!r} gets (step, metrics): {error}") from error


def override_lines(overrides: Overrides, name: str = "config") -> list[str]:
    """Returns overrides as the command line has them.

    Args:
      overrides: lines, or values by dotted key. A text is taken as it is, whatever it holds.
      name: of the argument, for errors.

    Raises:
      ValueError: one text in place of a list, or a value that no setting can have.
    """
    if isinstance(overrides, str):
        raise ValueError(f"{name}={overrides!r}: give a list of overrides, such as [{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{key}={_written(key, value)}" for key, value in overrides.items()]
    return list(overrides)


def _written(key: str, value: object) -> str:
    """Returns a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str | Path):
        text = str(value)
        if _PLAIN_TEXT.fullmatch(text):
            return text
        # Hydra unescapes backslashes only in front of a quote or at the end.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        inner = ",".join(f"{name}:{_written(key, item)}" for name, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, Sequence):
        inner = ",".join(_written(key, item) for item in value)
        return f"[{inner}]"
    raise ValueError(
        f"{key}={value!r}: a setting is a text, a number, true or false, null, a list or a mapping"
    )


def given_prompts(overrides: Overrides) -> dict[str, str]:
    """Returns prompts that are no paths, as lines of JSON by the name of their key."""
    prompts = {}
    settings = overrides if isinstance(overrides, Mapping) else {}
    for key in _SPLITS:
        rows = _rows(key, settings.get(key))
        try:
            lines = [json.dumps(dict(row), ensure_ascii=False) for row in rows]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}: its rows must be mappings of plain data: {error}") from error
        if lines:
            prompts[key] = "\n".join(lines)
    return prompts


def with_prompts(config: Config, prompts: Mapping[str, str]) -> Config:
    """Writes prompts into the run's folder and returns the settings with their files.

    A file is named after its content: prompts of a call that is refused replace none of the run's.
    """
    data = replace(config.data)
    for key, lines in prompts.items():
        name = key.removeprefix("data.")
        digest = hashlib.sha256(lines.encode()).hexdigest()
        folder = Path(config.trainer.output_dir).expanduser() / "prompts"
        file = folder / f"{name}_{digest[:8]}.jsonl"
        write_atomic(file, lines.encode())
        setattr(data, name, str(file))
    return replace(config, data=data)


def _rows(key: str, value: Any) -> list[Mapping[str, object]]:
    """Returns the rows of prompts; [] for paths, which stay what they are."""
    if isinstance(value, str) and (match := _HUB_ID.fullmatch(value)) and not _is_file(value):
        value = _from_hub(key, match[1], match[2] or _SPLITS[key])
    if value is None or isinstance(value, str | Path):
        return []
    rows = list(value)
    texts = [str(row) for row in rows if isinstance(row, str | Path)]
    files = [text for text in texts if _PATH.fullmatch(text) or _is_file(text)]
    if files and len(files) == len(rows):
        return []
    if isinstance(value, Sequence) and not files:
        rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    misfits = (row for row in files or rows if not isinstance(row, Mapping))
    wrong = next((f"{row!r} does not fit" for row in misfits), "")
    if not rows and not isinstance(value, Sequence):
        wrong = "it holds nothing"
    if wrong:
        raise ValueError(
            f"{key}: give files, or a list of texts, or rows such as {{'prompt': ...}}, here of a "
            f"{type(value).__name__}; {wrong}"
        )
    return rows


def _is_file(text: str) -> bool:
    """Returns whether a text ends as prompt files do, or is the path of something."""
    path = os.path.expanduser(text)  # that of Path raises for other texts that begin with ~
    return Path(path).suffix in PROMPT_FILES or os.path.exists(path)


def _from_hub(key: str, name: str, split: str) -> Iterable[object]:
    try:
        from datasets import load_dataset

        rows: Iterable[object] = load_dataset(name, split=split)
    # The border to the library, which raises what it likes.
    except Exception as error:
        missing = isinstance(error, ImportError)
        why = install_hint("datasets") if missing else " ".join(str(error).split())
        raise ValueError(
            f"{key}={name}: no such file or folder, nor part {split!r} of a dataset of the Hub "
            f"({name}:PART names another): {why}"
        ) from error
    return rows

"""Takes secrets out of what is written: by their name, in URLs, and those of the environment."""

import os
import re
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, TypeVar

T = TypeVar("T")
REDACTED = "***"
# How a name ends that holds a secret: X-Api-Key and HF_TOKEN, but not max_tokens or monkey.
_NAME = (
    r"(?:(?:password|passwd|pwd|passphrase|secret|credential|cookie)s?|authorization|bearer|jwt|dsn"
    r"|(?:api|access|account|auth|private|secret|session)[_-]?key(?:[_-]?id)?s?|secret[_-]?id"
    r"|session[_-]?id|token|(?<![a-z])(?:key|auth))"
)
_NAMED = re.compile(rf"{_NAME}$", re.IGNORECASE)
# "a key: gold" is prose. An open quote goes up to the end, so that the time stays linear.
_ITEM = re.compile(
    rf"(?P<start>(?P<name>{_NAME})(?:\\*[\"']\s*[=:]|=|(?<![^\w-]key)(?<![^\w-]token):)"
    r"\s*(?:(?:Bearer|Basic) +)?+)(?!\{)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*+\"?|'(?:[^'\\]|\\.)*+'?|\[[^\]]*\]?|[^\s,;&}\])]+)",
    re.IGNORECASE | re.DOTALL,
)
_URL = re.compile(r"://[^\s\"'<>]+")


def redact(value: T) -> T:
    """Replaces secrets by `***` in a text, or in a tree of mappings, lists and scalars."""
    redacted: Any = _redacted(value, _secrets_of_environment())
    return redacted


def redact_command(words: Sequence[str]) -> str:
    """Returns a command line for a shell, without secrets."""
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        name, _, value = word.partition("=")
        follows = before.startswith("-") and not word.startswith("-") and _NAMED.search(before)
        hidden = REDACTED if follows else f"{name}={REDACTED}"
        shown.append(hidden if follows or _is_secret(name, value) else quote(redact(word)))
    return " ".join(shown)


def _redacted(value: object, known: Sequence[str], name: str = "") -> object:
    if _is_secret(name, value):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _redacted(item, known, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item, known) for item in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, REDACTED)
    return _ITEM.sub(_without_value, _URL.sub(_without_user, value))


def _is_secret(name: str, value: object) -> bool:
    # A mapping is walked, since a reward may be called `password`. A number may name a token.
    if value in (None, "") or isinstance(value, bool | Mapping) or str(value).startswith("{"):
        return False
    number = name.lower().endswith("token") and str(value).isdigit()
    return _NAMED.search(name) is not None and not number


def _without_value(item: re.Match[str]) -> str:
    return f"{item['start']}{REDACTED}" if _is_secret(item["name"], item["value"]) else item[0]


def _without_user(url: re.Match[str]) -> str:
    place, query, _ = url[0].partition("?")
    return re.sub(r"^://[^/]*@", f"://{REDACTED}@", place) + (query and f"?{REDACTED}")


def _secrets_of_environment() -> list[str]:
    """Returns the values of secret variables, the longest first; no common words and no files."""
    values = [value for name, value in os.environ.items() if _is_secret(name, value)]
    common = [value for value in values if value.isalpha() or value.isdigit() or len(value) < 8]
    rare = [value for value in values if len(value) >= 16 or value not in common]
    return sorted((value for value in rare if not os.path.exists(value)), key=len, reverse=True)

"""Writing files whole or not at all, and taking secrets out of what is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

REDACTED = "***"
TEMPORARY = ".tmp"  # how names of files end that are not complete

# The words of a name: X-Api-Key has three, apiKey and HF_TOKEN two, key2 one.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Names, in small letters and nothing else, that hold a secret whatever its value is.
_SECRET_NAME = re.compile(
    r".*(?:(?:password|passwd|pwd|passphrase|secret|credential|cookie"
    r"|(?:access|api|auth|private|secret|session)(?:key|token))s?(?:id|value|base)?"
    r"|authorization|bearer|dsn|jwt|sess(?:ion)?id)"
)
# Names, with _ between their words, that may hold one, though not as a number. Some keys and tokens
# are none.
_LIKELY_NAME = re.compile(
    r"(?!(?:.*_)?(?:batch|cache|caption|column|config|data|dict|feature|field|foreign|group|hot"
    r"|image|index|input|json|keep|label|lookup|map|metric|output|primary|prompt|public|row|sort"
    r"|target|text)_key$)"
    r"(?!(?:.*_)?(?:bos|cls|end|eos|first|image|last|mask|max|min|next|num|pad|per|prefix|sep"
    r"|special|start|stop|text|trigger|unk)_?token$)"
    r"(?:(?:.*_)?(?:key|auth|headers)|.*token)"
)
# Those of them that hold several, by names of others.
_GROUPS = ("auth", "headers")
_TERM = re.compile(r"(?:.*\.)?terms\.[^.]+")  # a reward, which may be called `password`
# Parameters of a URL that hold one besides.
_PARAMETERS = ("auth", "code", "hmac", "sig", "signature")
# Secrets that are known by their form.
# Lengths are bounded where a longer text would be read again from each of its places.
_FORM = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,512}\.[\w-]{8,}\.[\w-]+)"
    r"|(?<=\bBearer )[\w.~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_URL = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]*://[^\s\"'<>]+")
# A password may have slashes, but what follows a port is a path.
_USER = re.compile(r"(?<=://)(?:[^/?#@:\[]*:(?:[^/?#]*|(?!\d*/)[^?#]{,100})|[^/?#@:]{16,})(?=@)")
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#?]+)=[^&;#]+")
# A name in a text with what separates it from its value: api_key=, "api_key": on one line or two,
# "name": "api_key", "value":, ('api_key',, api_key%3D or --api-key and a space.
_QUOTE = r"\\*[\"']"
_NAME = re.compile(
    rf"(?<![\w.-])(?P<tuple>\({_QUOTE})?+(?P<option>--)?(?P<name>[\w.-]*\w)"
    rf"(?:{_QUOTE}(?(tuple)\s*,|\s*(?:,\s*{_QUOTE}value{_QUOTE}\s*)?[=:])\s*+"
    r"|(?:, ?value(?=:)|[ \t]*)(?P<separator>[=:]|%3[Dd])[ \t]*+|(?(option) +(?!-)|(?!)))"
    r"(?:(?:Bearer|Basic) +)?+(?!//|\*\*\*)"
)
# The value is in quotes, in brackets, or goes up to a space. On a command line it may have spaces.
_ENCLOSED = (
    r"\{[^}]*\}?|\[[^\]]*\]?|\"(?:[^\"\\]|\\.)*+\"?|'(?:[^'\\]|\\.)*+'?"
    r"|\\+\"[^\"]*\"?|\\+'[^']*'?"
)
_VALUE = re.compile(rf"{_ENCLOSED}|[^\s,;}}\])]+", re.DOTALL)
_LONG_VALUE = re.compile(rf"{_ENCLOSED}|[^,}}\]]+", re.DOTALL)
# These headers go up to the end of the line, but for brackets that close.
_HEADER = re.compile(r"(?:proxy-)?authorization|(?:set-)?cookie", re.IGNORECASE)
_LINE = re.compile(rf"{_ENCLOSED}|[^\r\n]*[^\r\n}}\]]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?[\d.]+(?:e[+-]?\d+)?|true|false|none|null", re.IGNORECASE)
# Unlike the words that follow "key:" in a sentence.
_CODE = re.compile(r".*\d.*|.{16,}", re.DOTALL)
# Values of the environment that are looked for everywhere: no common words.
_RARE = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{8,}|.{16,}", re.DOTALL)


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file such that a crash leaves either the old content or the new one.

    Args:
      path: the file; its folder exists.
      content: everything that the file shall hold.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    # Somebody else's folder may hold a link of this name to a file of ours.
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content)
        # The content has to be on the disk before the name is, or a crash leaves an empty file.
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    # The new name is an entry of the folder, which is written to the disk for itself.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def plain_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file that this package has written.

    Such a file has no aliases (`*name`), a few of which may stand for billions of values.

    Raises:
      ValueError: the file is damaged, holds no mapping, or has an alias.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has YAML aliases")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no mapping")
    return found


def redact(value: Any) -> Any:
    """Replaces passwords, keys and tokens by `***`.

    A secret is known by the name that it is assigned to (of an item, in a text or in a URL), by its
    form, or because a variable of the environment with such a name holds the same text.

    Args:
      value: a tree of mappings, lists and scalars, such as a configuration, or a text.

    Returns:
      A copy without secrets.
    """
    return _redacted(value, _secrets_of_environment())


def redact_command(words: Sequence[str]) -> str:
    """Returns a command line as one text without secrets.

    Args:
      words: such as `sys.argv`; a secret may have spaces.
    """
    known = _secrets_of_environment()
    shown = []
    hides_next = False
    for word in words:
        name, equals, value = word.partition("=")
        option = word.startswith("-")
        if hides_next and not option:
            shown.append(REDACTED)
        elif equals and _holds_secret(name, value):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(_redacted_text(word, known, in_command=True))
        hides_next = option and not equals and _holds_secret(name, "")
    return " ".join(shown)


def _redacted(value: Any, known: re.Pattern[str], name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _redacted_item(value, key, known, name) for key in value}
    if isinstance(value, list | tuple):
        return [_redacted(item, known) for item in value]
    return _redacted_text(value, known) if isinstance(value, str) else value


def _redacted_item(
    mapping: Mapping[Any, Any], key: Any, known: re.Pattern[str], parent: str
) -> Any:
    item = mapping[key]
    # {name: Authorization, value: x} says the same as {Authorization: x}.
    name = str(mapping.get("name", key) if key == "value" else key)
    path = f"{parent}.{name}"
    return _hidden(item) if _holds_secret(path, item) else _redacted(item, known, path)


def _hidden(value: Any) -> Any:
    """Returns a tree with `***` in place of all that says something."""
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return value if value in (None, "") or isinstance(value, bool) else REDACTED


def _holds_secret(name: str, value: Any) -> bool:
    """Returns whether a value of this dotted name is a secret, or holds some.

    Args:
      value: a text that begins with { is taken for a mapping.
    """
    mapping = isinstance(value, Mapping) or str(value).startswith("{")
    if mapping and _TERM.fullmatch(name):
        return False
    if _names_secret(name):
        return True
    if mapping:
        return _spelt(name).endswith(_GROUPS)
    number = isinstance(value, int | float) or _NUMBER.fullmatch(str(value))
    return not number and _LIKELY_NAME.fullmatch(_spelt(name)) is not None


def _names_secret(name: str) -> bool:
    return _SECRET_NAME.fullmatch(_spelt(name).replace("_", "")) is not None


def _spelt(name: str) -> str:
    """Returns the last part of a dotted name in small letters, with _ between its words."""
    return "_".join(_WORD.findall(name.rpartition(".")[2])).lower()


def _redacted_text(text: str, known: re.Pattern[str], *, in_command: bool = False) -> str:
    text = _FORM.sub(REDACTED, known.sub(REDACTED, text))
    text = _URL.sub(lambda match: _redacted_url(match[0]), text)
    pieces = []
    end = 0
    for match in _NAME.finditer(text):
        name = match["name"]
        # A mapping is known by its bracket: to read it for each name would take long.
        start = "{" if text.startswith("{", match.end()) else ""
        if match.start() < end or not _holds_secret(name, start):
            continue
        form = _LONG_VALUE if in_command else _VALUE
        if match["separator"] == ":" and _HEADER.fullmatch(name):
            form = _LINE
        value = form.match(text, match.end())
        if value is None or not _holds_secret(name, value[0]):
            continue
        sure = in_command or match["separator"] == "=" or _names_secret(name)
        if sure or _CODE.fullmatch(value[0]):
            pieces += [text[end : match.end()], REDACTED]
            end = value.end()
    return "".join([*pieces, text[end:]])


def _redacted_url(url: str) -> str:
    def parameter(match: re.Match[str]) -> str:
        name = match[1]
        secret = _holds_secret(name, "") or name.lower().rpartition("-")[2] in _PARAMETERS
        return f"{name}={REDACTED}" if secret else match[0]

    return _PARAMETER.sub(parameter, _USER.sub(REDACTED, url))


def _secrets_of_environment() -> re.Pattern[str]:
    """Returns what finds the values of variables with the name of a secret."""
    values = [
        value
        for name, value in os.environ.items()
        if _RARE.fullmatch(value) and _holds_secret(name, value) and not os.path.exists(value)
    ]
    # Of two that begin alike, the longer one is found.
    found = map(re.escape, sorted(values, key=len, reverse=True))
    return re.compile("|".join(found) or "(?!)")

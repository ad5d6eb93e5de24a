"""Reading what other people may have written: small JSON files, and blame for what is damaged or
cannot be had from the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

ANSWER_S = 5.0  # for the Hub to answer a first question
_MOST_BYTES = 64 * 2**20
_MOST_LEVELS = 100  # of lists and mappings inside of one another; readers walk them by recursion


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping, neither too large nor too deep."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} cannot be read: it has more than {_MOST_BYTES >> 20} MiB")
    with blaming(path):
        return parse_mapping(path.read_bytes())


def parse_mapping(text: str | bytes, *, unique: bool = False) -> dict[str, Any]:
    """Parses JSON that holds a mapping, nested no deeper than readers can walk.

    With `unique`, a key that stands twice is refused; else its last value counts.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from error
    if not isinstance(found, dict):
        raise ValueError("it holds no mapping")
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        nodes = [node.values() if isinstance(node, dict) else node for node in level]
        level = [item for node in nodes for item in node if isinstance(item, dict | list)]
        if not level:
            return found
    raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")


@contextmanager
def blaming(what: Path | str) -> Iterator[None]:
    """Names a file, or a setting and its file, in every error that comes of its content."""
    try:
        yield
    # Every exception, since libraries raise what they like where they expect another content.
    except Exception as error:
        if str(what) in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        first = (reason or type(error).__name__).splitlines()[0]
        raise ValueError(f"{what} cannot be read: {first}") from error


def check_on_hub(repository: str, names: Sequence[str], *, key: str) -> None:
    """Raises ValueError that names the key if none of the files can be had; fetches nothing.

    A file can be had if it is in the cache, or if the Hub answers a HEAD request for it.
    """
    if any(isinstance(try_to_load_from_cache(repository, name), str) for name in names):
        return
    with asking_hub(repository, " and no ".join(names), key=key):
        for name in names:
            try:
                ask_hub(repository, name)
                return
            except RemoteEntryNotFoundError:
                if name == names[-1]:
                    raise


def ask_hub(repository: str, name: str) -> None:
    """Asks the Hub for a file by one HEAD request; a download would try for half a minute.

    Raises LocalEntryNotFoundError without an answer, and HfHubHTTPError for one that refuses.
    """
    try:
        get_hf_file_metadata(hf_hub_url(repository, name), timeout=ANSWER_S)
    except HfHubHTTPError:
        raise
    # The border to the library, which raises what its own library of requests does.
    except Exception as error:
        raise LocalEntryNotFoundError(f"no answer: {error}") from error


@contextmanager
def asking_hub(repository: str, name: str, *, key: str) -> Iterator[None]:
    """Turns what the Hub refuses of a file into a ValueError with the key and what helps."""
    where = f"{key}={repository}"
    try:
        yield
    except LocalEntryNotFoundError as error:
        why = _no_network(repository, error.__cause__)
        if isinstance(error.__cause__, HfHubHTTPError):
            why = f"the Hub refuses {name}: {error.__cause__}"
        raise ValueError(f"{where}: {why}") from error
    except EntryNotFoundError as error:
        raise ValueError(f"{where}: this repository of the Hub has no {name}") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{where}: the Hub asks you to accept the licence of this model: do so at "
            f"{constants.ENDPOINT}/{repository}, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{where}: the Hub shows no such repository to you: correct the id, or, if it is "
            "private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{where}: the Hub refuses {name}: {error}") from error
    except HFValidationError as error:
        raise ValueError(f"{where}: there is no such folder, and {error}") from error


def _no_network(repository: str, cause: BaseException | None) -> str:
    """Returns why a file that is not in the cache could not be fetched, and what helps."""
    why = f"{constants.ENDPOINT} cannot be reached ({cause})"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE forbids to fetch it"
    return (
        f"it is not in the local cache, and {why}; there is no local folder of this name either. "
        f"On a machine with network: hf download {repository} --local-dir my_model; then copy the "
        "folder here and give its path"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)!r} twice")
    return found

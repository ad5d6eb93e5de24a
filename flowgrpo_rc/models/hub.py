"""Finds a small file of a model, in a local folder or on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)


def model_file(path: str, name: str) -> Path:
    """Finds a file of the model at `model.path`, and fetches it if it is on the Hub.

    Raises:
      ValueError: it cannot be had. The message says whether the network, the access or the file is
        missing.
    """
    folder = Path(path).expanduser()
    if folder.exists():
        return folder / name
    try:
        return Path(hf_hub_download(path, name))
    except LocalEntryNotFoundError as error:
        refused = isinstance(error.__cause__, HfHubHTTPError)
        why = f"the Hub refuses {name}: {error.__cause__}" if refused else _no_network(path)
        raise ValueError(f"model.path={path}: {why}") from error
    except EntryNotFoundError as error:
        raise ValueError(f"model.path={path}: this repository of the Hub has no {name}") from error
    except GatedRepoError as error:
        raise ValueError(
            f"model.path={path}: the Hub asks you to accept the licence of this model: do so at "
            f"{constants.ENDPOINT}/{path}, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model.path={path}: the Hub shows no such repository to you: correct the id, or, if "
            "it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"model.path={path}: the Hub refuses {name}: {error}") from error


def _no_network(path: str) -> str:
    """Returns why a file that is not in the cache could not be fetched, and what helps."""
    why = f"it is not in the local cache, and {constants.ENDPOINT} cannot be reached"
    if constants.HF_HUB_OFFLINE:
        why = "it is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it"
    return (
        f"{why}; there is no local folder of this name either. On a machine with network: "
        f"hf download {path} --local-dir my_model; then copy the folder here and give it as "
        "model.path"
    )

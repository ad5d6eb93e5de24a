"""The upload of an exported LoRA and its card to the Hugging Face Hub.

The repository is private unless asked otherwise, and nothing but these files is uploaded. The token
comes from the environment (HF_TOKEN) or from `hf auth login`; it is never read from a setting and
never printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from flowgrpo_rc.exports.model_card import CARD_NAME
from flowgrpo_rc.models.lora_files import CONFIG_NAME, EXPORT_NAMES
from flowgrpo_rc.redaction import redact

UPLOADED = (*EXPORT_NAMES.values(), CONFIG_NAME, CARD_NAME)


def check_push(api: HfApi, repo: str, *, public: bool) -> None:
    """Raises ValueError or OSError, before anything is loaded, if `push` could not upload a LoRA.

    A repository that is public already needs `public`. Nothing is created.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"--push-to-hub {repo!r}: write it as user/name or organization/name")
    if constants.HF_HUB_OFFLINE:
        raise ValueError("--push-to-hub needs the network: unset HF_HUB_OFFLINE")
    if (api.token or get_token()) is None:
        raise ValueError("--push-to-hub needs a token: run `hf auth login`, or set HF_TOKEN")
    with _hub_errors():
        api.whoami()
        try:
            private = api.model_info(repo).private
        except RepositoryNotFoundError:
            return
    if not private and not public:
        raise ValueError(f"--push-to-hub {repo}: this repository is public; add --public")


def push(api: HfApi, folder: Path, repo: str, *, public: bool, others: Sequence[str] = ()) -> str:
    """Uploads a LoRA and its card, and returns the address of the repository.

    The repository is created if there is none, and is `public` then, or private. `others` are
    transformers beside the first, whose LoRAs lie in folders with their names.
    """
    further = [f"{name}/{EXPORT_NAMES['diffusion']}" for name in others]
    with _hub_errors():
        url = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[*UPLOADED, *further],
            commit_message="Upload LoRA and model card",
        )
    return str(url)


@contextmanager
def _hub_errors() -> Iterator[None]:
    try:
        yield
    # The border to the network: which library raises depends on the version of the Hub's client.
    except Exception as error:
        reason = redact(" ".join(str(error).split()) or type(error).__name__)
        raise OSError(f"the Hugging Face Hub refused, or could not be reached: {reason}") from error

"""An exported LoRA with its card on the Hugging Face Hub: private unless asked otherwise, and
nothing but these files.

The token is that of the environment (HF_TOKEN) or of `hf auth login`; it is never read from a
setting or printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from flowgrpo_rc.export.model_card import CARD_NAME
from flowgrpo_rc.files import redact
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.models.peft_files import CONFIG_NAME

UPLOADED = (*EXPORT_NAMES.values(), CONFIG_NAME, CARD_NAME)


def check_push(api: HfApi, repo: str, *, public: bool) -> None:
    """Whether a LoRA can be pushed to `repo`, before anything is loaded; creates nothing.

    Raises ValueError for a name that is none, without a token, offline, and for a repository that
    everybody sees where `public` does not say so; OSError where the Hub refuses the token or cannot
    be reached.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"--push-to-hub {repo!r}: write it as user/name or organization/name")
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            "--push-to-hub needs the network, and HF_HUB_OFFLINE is set: unset it, or drop the "
            "option"
        )
    if (api.token or get_token()) is None:
        raise ValueError(
            "--push-to-hub needs a token: log in with `hf auth login`, or set HF_TOKEN"
        )
    with _hub_errors():
        api.whoami()
        try:
            private = api.model_info(repo).private
        except RepositoryNotFoundError:
            return
    if not private and not public:
        raise ValueError(
            f"--push-to-hub {repo}: this repository is public; add --public to upload to it"
        )


def push(api: HfApi, folder: Path, repo: str, *, public: bool) -> str:
    """Uploads the LoRA and its card, creating the repository where there is none; returns its
    address.

    Raises OSError where the Hub refuses or cannot be reached.
    """
    with _hub_errors():
        url = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(UPLOADED),
            commit_message="Upload LoRA and model card",
        )
    return str(url)


@contextmanager
def _hub_errors() -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # the border to the network, whose library depends on the Hub client's version
        reason = redact(" ".join(str(error).split()) or type(error).__name__)
        raise OSError(f"the Hugging Face Hub refused, or could not be reached: {reason}") from error

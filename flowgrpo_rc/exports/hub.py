"""The upload of an exported LoRA and its card to the Hugging Face Hub.

The repository is private unless asked otherwise, and nothing but these files is uploaded. The token
comes from the environment (HF_TOKEN) or from `hf auth login`; it is never read from a setting and
never printed.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from flowgrpo_rc.exports.model_card import CARD_NAME, PICTURES
from flowgrpo_rc.models.lora_files import CONFIG_NAME, EXPORT_NAMES
from flowgrpo_rc.redaction import redact

UPLOADED = (*EXPORT_NAMES.values(), CONFIG_NAME, CARD_NAME, f"{PICTURES}/*.png")
logger = logging.getLogger(__name__)


class Uploads:
    """Uploads the LoRAs of a run in the background, to a private repository.

    What fails is warned of, and the run goes on; the next LoRA is another try.
    """

    def __init__(self, api: HfApi, repo: str) -> None:
        """Begins to look whether the repository can be written."""
        self.repo = repo
        self._api = api
        self._checked = False
        self._last = {"": api.run_as_future(self._attempt)}  # by subfolder of the repository

    def add(self, folder: Path, step: int, others: Sequence[str], subfolder: str = "") -> None:
        """Uploads a folder that does not change any more, in place of one that still waits."""
        if subfolder in self._last:
            self._last[subfolder].cancel()
        told = {"message": f"LoRA of step {step}", "subfolder": subfolder}
        upload = partial(push, self._api, folder, self.repo, public=False, others=others, **told)
        self._last[subfolder] = self._api.run_as_future(self._attempt, upload)

    def finish(self) -> None:
        """Waits until the last uploads are done."""
        wait(self._last.values())

    def _attempt(self, upload: Callable[[], str] | None = None) -> None:
        try:
            if not self._checked:
                check_push(self._api, self.repo, public=False, setting="trainer.push_to_hub")
                self._checked = True
            if upload is not None:
                upload()
        except (OSError, ValueError) as error:
            logger.warning("nothing is uploaded now, and the run goes on: %s", error)


def check_push(api: HfApi, repo: str, *, public: bool, setting: str = "--push-to-hub") -> None:
    """Raises ValueError or OSError, before anything is loaded, if `push` could not upload a LoRA.

    A repository that is public already needs `public`. Nothing is created. `setting` is what asks
    for it.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{setting} {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"{setting} {repo!r}: write it as user/name or organization/name")
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{setting} needs the network: unset HF_HUB_OFFLINE")
    if (api.token or get_token()) is None:
        raise ValueError(f"{setting} needs a token: run `hf auth login`, or set HF_TOKEN")
    with _hub_errors():
        api.whoami()
        try:
            private = api.model_info(repo).private
        except RepositoryNotFoundError:
            return
    if not private and not public:
        raise ValueError(
            f"{setting} {repo}: this repository is public; add --public (of flowgrpo-rc export)"
        )


def push(
    api: HfApi,
    folder: Path,
    repo: str,
    *,
    public: bool,
    others: Sequence[str] = (),
    subfolder: str = "",
    message: str = "Upload LoRA and model card",
) -> str:
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
            path_in_repo=subfolder,
            allow_patterns=[*UPLOADED, *further],
            commit_message=message,
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

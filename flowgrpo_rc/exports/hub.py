"""The upload of an exported LoRA and its card to the Hugging Face Hub.

The repository is private unless asked otherwise, and nothing but these files is uploaded. The token
comes from the environment (HF_TOKEN) or from `hf auth login`; it is never read from a setting and
never printed.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub, `name` is user/name, that LoRAs are uploaded to."""

    api: HfApi
    name: str
    public: bool = False  # if it is new; one that is public already needs this, too

    def check(self, setting: str = "--push-to-hub") -> None:
        """Raises ValueError or OSError, before anything is loaded, if `push` could not upload.

        Nothing is created. `setting` is what asks for the upload.
        """
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise ValueError(f"{setting} {self.name!r}: {error}") from error
        problem = ""
        if self.name.count("/") != 1:
            problem = f" {self.name!r}: write it as user/name or organization/name"
        elif constants.HF_HUB_OFFLINE:
            problem = " needs the network: unset HF_HUB_OFFLINE"
        elif (self.api.token or get_token()) is None:
            problem = " needs a token: run `hf auth login`, or set HF_TOKEN"
        elif self._is_public() and not self.public:
            problem = (
                f" {self.name}: this repository is public; add --public (of flowgrpo-rc export)"
            )
        if problem:
            raise ValueError(f"{setting}{problem}")

    def _is_public(self) -> bool:
        with _hub_errors():
            self.api.whoami()
            try:
                return not self.api.model_info(self.name).private
            except RepositoryNotFoundError:
                return False

    def push(
        self,
        folder: Path,
        others: Sequence[str] = (),
        *,
        subfolder: str = "",
        message: str = "Upload LoRA and model card",
    ) -> str:
        """Uploads a LoRA and its card, and returns the address of the repository.

        The repository is created if there is none. `others` are transformers beside the first,
        whose LoRAs lie in folders with their names.
        """
        further = [f"{name}/{EXPORT_NAMES['diffusion']}" for name in others]
        with _hub_errors():
            url = self.api.create_repo(self.name, private=not self.public, exist_ok=True)
            self.api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                path_in_repo=subfolder,
                allow_patterns=[*UPLOADED, *further],
                commit_message=message,
            )
        return str(url)


class Uploads:
    """Uploads the LoRAs of a run in the background, to a private repository.

    What fails is warned of, and the run goes on; the next LoRA is another try.
    """

    def __init__(self, api: HfApi, repo: str) -> None:
        """Begins to look whether the repository can be written."""
        self.repo = repo
        self._repository = Repository(api, repo)
        self._checked = False
        self._last = {"": api.run_as_future(self._attempt)}  # by subfolder of the repository

    def add(self, folder: Path, step: int, others: Sequence[str], subfolder: str = "") -> None:
        """Uploads a folder that does not change any more, in place of one that still waits."""
        if subfolder in self._last:
            self._last[subfolder].cancel()
        message = f"LoRA of step {step}"
        push = partial(self._repository.push, folder, others, subfolder=subfolder, message=message)
        self._last[subfolder] = self._repository.api.run_as_future(self._attempt, push)

    def finish(self) -> None:
        """Waits until the last uploads are done."""
        wait(self._last.values())

    def _attempt(self, push: Callable[[], str] | None = None) -> None:
        try:
            if not self._checked:
                self._repository.check("trainer.push_to_hub")
                self._checked = True
            if push is not None:
                push()
        except (OSError, ValueError) as error:
            logger.warning("nothing is uploaded now, and the run goes on: %s", error)


@contextmanager
def _hub_errors() -> Iterator[None]:
    try:
        yield
    # The border to the network: which library raises depends on the version of the Hub's client.
    except Exception as error:
        reason = redact(" ".join(str(error).split()) or type(error).__name__)
        raise OSError(f"the Hugging Face Hub refused, or could not be reached: {reason}") from error

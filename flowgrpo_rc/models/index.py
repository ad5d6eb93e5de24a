"""Small files of a model, local or on the Hub, such as a pipeline's model_index.json."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.reading import ANSWER_S, ask_hub, asking_hub, read_mapping

# How model_index.json writes a component that is not there.
ABSENT = [None, None]
# Where the classes of components come from. Any other module would be imported by its mere name.
_LIBRARIES = ("diffusers", "transformers")


def read_index(config: ModelConfig) -> dict[str, Any]:
    """Reads model_index.json. ValueError if it cannot be read, or names code of its own."""
    file = model_file(config.path, INDEX_FILES["diffusion"])
    try:
        index = read_mapping(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={config.path}: cannot be read as a diffusers pipeline: {error}"
        ) from error
    for name, value in index.items():
        match value:
            case [str() as library, str()] if library not in _LIBRARIES:
                raise ValueError(
                    f"model.path={config.path}: its {name} is {value}, and only classes of "
                    f"{' and '.join(_LIBRARIES)} are loaded: code of a model is never run"
                )
            case None | bool() | int() | float() | [str(), str()] | [None, None]:
                continue
        if not name.startswith("_"):
            raise ValueError(
                f"model.path={config.path}: its {name} is {value}, which is neither a library and "
                f"a class, nor a setting, in {INDEX_FILES['diffusion']}"
            )
    return index


def model_file(path: str, name: str) -> Path:
    """Finds a file of the model at `model.path`, or on the Hub. ValueError says why it cannot."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder / name
    with asking_hub(path, name, key="model.path"):
        if not isinstance(try_to_load_from_cache(path, name), str):
            with suppress(HfHubHTTPError):  # it answers; the download says what is wrong
                ask_hub(path, name)
        return Path(hf_hub_download(path, name, etag_timeout=ANSWER_S))

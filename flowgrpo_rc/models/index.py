"""Small files of a model, local or on the Hub, such as a pipeline's model_index.json."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from flowgrpo_rc.models.config import INDEX_FILES, ModelConfig
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.reading import ANSWER_S, ask_hub, asking_hub, blaming, read_mapping

# How model_index.json writes a component that is not there.
ABSENT = [None, None]
# Where the classes of components come from. Any other module would be imported by its mere name.
_LIBRARIES = ("diffusers", "transformers")


def read_index(config: ModelConfig) -> dict[str, object]:
    """Reads model_index.json. ValueError if it cannot be read, or names code of its own."""
    where = f"model.path={config.path}"
    file = model_file(config.path, INDEX_FILES["diffusion"])
    with blaming(f"{where} as a diffusers pipeline"):
        index = read_mapping(file)
    for name, value in index.items():
        is_class = isinstance(value, list) and [type(word) for word in value] == [str, str]
        is_setting = isinstance(value, bool | int | float | None) or value == ABSENT
        libraries = " and ".join(_LIBRARIES)
        refuse(
            (
                is_class and value[0] not in _LIBRARIES,
                f"and only classes of {libraries} are loaded: code of a model is never run",
            ),
            (
                not (is_class or is_setting or name.startswith("_")),
                f"which is neither a library and a class, nor a setting, in {file.name}",
            ),
            about=f"{where}: its {name} is {value}, ",
        )
    return index


def components_in(index: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Returns library and class of each component that is there, by name."""
    lists = {name: value for name, value in index.items() if isinstance(value, list)}
    return {
        name: (value[0], value[1])
        for name, value in lists.items()
        if value != ABSENT and not name.startswith("_")
    }


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

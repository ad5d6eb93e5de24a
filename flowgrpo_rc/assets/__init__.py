"""Files that ship with the package: tiny checkpoints, their prompts, and suites."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
SUITES = ROOT / "suites"
_FOLDER = "/flowgrpo_rc/assets/"  # of every installation


def path(name: str) -> Path:
    """Returns the path of a bundled folder or file.

    Args:
      name: such as "tiny_glyph_sd3" or "prompts/glyph_train.txt".

    Returns:
      The path.

    Raises:
      ValueError: there is no such asset; the message lists those that exist.
    """
    available = _bundled()
    if name not in available:
        raise ValueError(f"no bundled asset {name!r}; available: {', '.join(available)}")
    return ROOT / name


def with_references(tree: Any) -> Any:
    """Replaces paths of this installation's assets by `${asset:NAME}`, which holds in every one.

    Args:
      tree: mappings, lists and scalars.

    Returns:
      A copy. Other paths stay as they are, those of files beside the assets included.
    """
    return _mapped(tree, lambda text: _reference(text) if text.startswith(f"{ROOT}/") else text)


def with_all_references(tree: Any) -> Any:
    """Replaces paths of assets in any installation by `${asset:NAME}`; otherwise as
    `with_references`.
    """
    return _mapped(tree, _reference)


def with_lost_references(tree: Any) -> Any:
    """Replaces paths of assets in an installation that is gone by `${asset:NAME}`; otherwise as
    `with_references`.
    """
    return _mapped(tree, _lost_reference)


def _lost_reference(text: str) -> str:
    reference = _reference(text)
    return text if reference != text and Path(text).exists() else reference


def _reference(text: str) -> str:
    _, found, name = text.rpartition(_FOLDER)
    return f"${{asset:{name}}}" if found and name in _bundled() else text


def _mapped(tree: Any, change: Callable[[str], str]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def _bundled() -> list[str]:
    checkpoints = [
        config.parent.name
        for name in ("model_index", "config")
        for config in ROOT.glob(f"*/{name}.json")
    ]
    prompts = [f"prompts/{file.name}" for file in ROOT.glob("prompts/*")]
    return sorted(checkpoints) + sorted(prompts)

"""Files that ship with the package: tiny checkpoints, their prompts, and suites."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
SUITES = ROOT / "suites"


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
    if isinstance(tree, Mapping):
        return {key: with_references(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [with_references(value) for value in tree]
    name = tree.removeprefix(f"{ROOT}/") if isinstance(tree, str) else tree
    return f"${{asset:{name}}}" if name != tree and name in _bundled() else tree


def _bundled() -> list[str]:
    checkpoints = [
        config.parent.name
        for name in ("model_index", "config")
        for config in ROOT.glob(f"*/{name}.json")
    ]
    prompts = [f"prompts/{file.name}" for file in ROOT.glob("prompts/*")]
    return sorted(checkpoints) + sorted(prompts)

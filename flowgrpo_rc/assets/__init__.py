"""Files that ship with the package: tiny checkpoints, their prompts, and what made both of them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


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


def _bundled() -> list[str]:
    checkpoints = [
        config.parent.name
        for name in ("model_index", "config")
        for config in ROOT.glob(f"*/{name}.json")
    ]
    prompts = [f"prompts/{file.name}" for file in ROOT.glob("prompts/*")]
    return sorted(checkpoints) + sorted(prompts)

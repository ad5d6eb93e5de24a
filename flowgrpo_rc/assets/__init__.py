"""Files that ship with the package: the tiny checkpoint and its prompt lists."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


def path(name: str) -> Path:
    """The path of a bundled folder or file, such as "tiny_glyph_sd3" or "prompts/glyph_train.txt".

    Raises ValueError, with what exists, for any other name.
    """
    available = _bundled()
    if name not in available:
        raise ValueError(f"no bundled asset {name!r}; available: {', '.join(available)}")
    return ROOT / name


def _bundled() -> list[str]:
    checkpoints = [index.parent.name for index in ROOT.glob("*/model_index.json")]
    prompts = [f"prompts/{file.name}" for file in ROOT.glob("prompts/*.txt")]
    return sorted(checkpoints) + sorted(prompts)

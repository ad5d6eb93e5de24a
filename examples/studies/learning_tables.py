"""What docs/evidence.md shows of the learning study."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cells import Cell

STUDY = "learning"
ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {}

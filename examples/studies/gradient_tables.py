"""What docs/evidence.md shows of the gradient study."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cells import Cell

STUDY = "gradient"
ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {"gradient_cells": lambda cells: str(len(cells))}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {}

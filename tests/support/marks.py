"""Marks of tests and of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: object) -> Any:
    """Returns parameters of a test that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(quick: Collection[object], values: Iterable[object]) -> list[Any]:
    """Returns the values of a parameter, slow unless they are among the quick ones."""
    return [value if value in quick else slow(value) for value in values]

"""Fitting the size of a fault."""

import pytest

from flowgrpo_rc.core.search import fit


@pytest.mark.parametrize("size", [0.31, 1.01, 1.2345678, 3.0, 6.9])
def test_the_size_of_a_fault_is_fitted(size: float) -> None:
    asked: list[float] = []

    def residual(x: float) -> float:
        asked.append(x)
        return abs(x * x - size * size)

    actual = fit(residual, [0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
    assert actual == pytest.approx(size, rel=1e-4)
    assert len(str(size)) > 6 or actual == size  # short numbers are met
    assert len(asked) < 40

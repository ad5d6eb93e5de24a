"""A search for the size of a fault that explains numbers best."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

GOLDEN = (math.sqrt(5) - 1) / 2  # a search shrinks its interval by this in every round
TOLERANCE = 1e-4  # of a fitted size, relative


def fit(residual: Callable[[float], float], grid: Sequence[float]) -> float:
    """Returns the positive number with the least residual, near the best of an ascending grid.

    It is found by golden-section search on a logarithmic scale. Settings are usually short numbers,
    so a shorter number wins if it is as good. The number of the grid wins if the residual has
    several valleys and the search ends in a shallower one.
    """
    best = min(range(len(grid)), key=lambda index: residual(grid[index]))
    low = math.log(grid[max(best - 1, 0)])
    high = math.log(grid[min(best + 1, len(grid) - 1)])
    # Each round looks at two places, one of which is a place of the round before. Rounding makes
    # the two equal, so the cache has its residual.
    at = lru_cache(maxsize=None)(lambda place: residual(math.exp(place)))
    while high - low > TOLERANCE:
        left = high - GOLDEN * (high - low)
        right = low + GOLDEN * (high - low)
        if at(round(left, 9)) < at(round(right, 9)):
            high = right
        else:
            low = left
    found = math.exp((low + high) / 2)
    # min returns the first of equals, so the shortest number comes first.
    shorter = [float(f"{found:.{digits}g}") for digits in (1, 2, 3, 4)]
    return min([*shorter, found, grid[best]], key=residual)

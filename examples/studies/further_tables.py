"""The tables, numbers and conclusions of docs/evidence.md that come from `ladder.py --further`.

Rewards and distances of pictures are less those of exact rollouts, seed by seed, ± the 95% interval
of Student's t. The rule is that of ladder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cells import RESULTS, Cell, load
from diversity import BASE
from diversity import STUDY as DIVERSITY
from estimates import NOTHING, Estimate, collapsed, difference, estimate
from ladder import FURTHER, REFERENCE, STUDY
from ladder_tables import against, behind, grouped
from tables import markdown

__all__ = ["CLAIMS", "ENTRIES", "STUDY"]

DISTANCES = ("pixels", "texts")
DEFAULTS = [cell for cell in FURTHER if cell[1] == "default"]
DOCUMENTS = [cell for cell in FURTHER if cell[1] in ("tis", "mis")]


def spread(cell: tuple[str, str], distance: str) -> dict[int, Cell]:
    """Returns a distance of the pictures of a cell's runs by seed, as rewards are kept."""
    rollout, arm = cell
    start = f"{rollout}_{arm}_seed"
    return {
        int(name.removeprefix(start)): {"after": row[distance]}
        for name, row in load(DIVERSITY, RESULTS).items()
        if name.startswith(start)
    }


def verdict(cells: Mapping[str, Cell], cell: tuple[str, str]) -> str:
    """Returns what the rule says of the default on a rollout: level, behind or open."""
    found = {" ".join(one): against(cells, *one) for one in DEFAULTS}
    known = {name: one for name, one in found.items() if one is not None}
    one = known[" ".join(cell)]
    if " ".join(cell) in behind(known):
        return "behind"
    level = abs(one.mean) <= one.half and not collapsed(grouped(cells)[cell])
    return "level" if level else "open"


def further(cells: Mapping[str, Cell]) -> str:
    """Makes the table: a row for each rollout and arm."""
    rows = []
    for cell in (*DEFAULTS, *DOCUMENTS):
        runs = grouped(cells)[cell]
        shown = [_signed(against(cells, *cell)), f"{collapsed(runs)} of {len(runs)}"]
        shown.append(verdict(cells, cell) if cell in DEFAULTS else NOTHING)
        shown += [_signed(_gap(cell, distance)) for distance in DISTANCES]
        rows.append([f"`{cell[0]}`", f"`{cell[1]}`", *shown])
    heads = ["rollout", "arm", "reward less exact", "fell", "verdict", *DISTANCES]
    return markdown(heads, rows)


def _gap(cell: tuple[str, str], distance: str) -> Estimate | None:
    return difference(spread(cell, distance), spread(REFERENCE, distance))


def _signed(found: Estimate | None) -> str:
    return NOTHING if found is None else found.signed


def _of_base(distance: str) -> Callable[[Mapping[str, Cell]], str]:
    return lambda cells: f"{load(DIVERSITY, RESULTS)[BASE][distance]:.3f}"


def _of_exact(distance: str) -> Callable[[Mapping[str, Cell]], str]:
    def shown(cells: Mapping[str, Cell]) -> str:
        return str(estimate([run["after"] for run in spread(REFERENCE, distance).values()]))

    return shown


def _costs_diversity(cell: tuple[str, str]) -> bool:
    found = [_gap(cell, distance) for distance in DISTANCES]
    return any(one is not None and one.mean + one.half < 0 for one in found)


ENTRIES: dict[str, Callable[[Mapping[str, Cell]], str]] = {
    "further": further,
    "further_base_pixels": _of_base("pixels"),
    "further_base_texts": _of_base("texts"),
    "further_exact_pixels": _of_exact("pixels"),
    "further_exact_texts": _of_exact("texts"),
}
CLAIMS: dict[str, Callable[[Mapping[str, Cell]], bool]] = {
    "further_default_is_level": lambda cells: (
        {verdict(cells, cell) for cell in DEFAULTS} == {"level"}
    ),
    "further_documents_help": lambda cells: (
        not any(collapsed(grouped(cells)[cell]) for cell in DOCUMENTS)
        and collapsed(grouped(cells)["int4", "recipe"]) == len(grouped(cells)["int4", "recipe"])
    ),
    "further_documents_are_alike": lambda cells: all(
        grouped(cells)["int4", "tis"][seed]["curves"]["reward"] == run["curves"]["reward"]
        for seed, run in grouped(cells)["int4", "mis"].items()
    ),
    "further_diversity_stays": lambda cells: not any(map(_costs_diversity, DEFAULTS)),
}

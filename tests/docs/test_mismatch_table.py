"""The table of mismatch by family and precision in docs/extending.md."""

from __future__ import annotations

import mismatch_table
import pytest
from mismatch_table import END, FAMILIES, PAGE, PRECISIONS, START, TINY, loaded, mismatch
from support.image_rollouts import trained_lora


def written() -> dict[tuple[str, str], list[float]]:
    """Returns the page's rows: (pipeline, guidance) -> mismatch by precision."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    rows = [line.strip("| ").split(" | ") for line in rest.partition(END)[0].split("\n")[3:]]
    return {
        (name.strip("`"), guidance): [float(cell) for cell in cells]
        for name, guidance, *cells in (row for row in rows if len(row) > 1)
    }


def test_every_family_is_in_the_table_and_exact_in_fp32() -> None:
    table = written()
    assert set(table) == {(name, guidance) for name in FAMILIES for guidance in ("no", "yes")}
    assert all(len(cells) == len(PRECISIONS) for cells in table.values())
    assert {cells[0] for cells in table.values()} == {0}


@pytest.mark.kernels
@pytest.mark.parametrize("pipeline", FAMILIES)
def test_the_page_has_what_is_measured(pipeline: str) -> None:
    """Kernels differ between processors: within a factor of 2."""
    model = loaded(pipeline)
    network = trained_lora(model)
    of_page = dict(zip(PRECISIONS, written()[pipeline, "no"], strict=True))
    for precision in (("fp32", None), ("bf16", None)):
        found = mismatch(model, network, TINY[pipeline], False, *precision)
        assert of_page[precision] / 2 <= found <= of_page[precision] * 2, (
            f"{mismatch_table.PAGE.name} is old: run `make mismatch`"
        )

"""Writes the table of docs/scaling_out.md from the tests in tests/faults: `make reference`.

A test names what it does to a run, and what then happens, by the mark `fault`; `make test-faults`
prints both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "scaling_out.md"
SUITE = DOCS.parent / "tests" / "faults"
START = "<!-- Written by `make reference` from tests/faults. -->\n"
END = "<!-- End of what is written. -->\n"


def page() -> str:
    """Returns docs/scaling_out.md with its table as the suite has it."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{''.join(table())}\n{END}{after}"


def table() -> Iterator[str]:
    """Yields the rows of the table: what each file of the suite shows."""
    yield "| what is tested |\n|---|\n"
    for file in sorted(SUITE.glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        title = (ast.get_docstring(tree) or "").split("\n")[0].rstrip(".")
        yield f"| {title} |\n"


def faults(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the two texts of each mark `fault` in a file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "fault":
                    harm, outcome = (ast.literal_eval(argument) for argument in mark.args)
                    yield harm, outcome


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

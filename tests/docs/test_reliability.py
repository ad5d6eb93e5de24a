"""The table of faults is that of the suite."""

from __future__ import annotations

import ast

import fault_table


def test_the_table_is_that_of_the_suite() -> None:
    committed = fault_table.PAGE.read_text(encoding="utf-8")
    assert committed == fault_table.page(), "docs/scaling_out.md is old: run `make reference`"


def test_every_test_of_the_suite_names_its_fault() -> None:
    for file in fault_table.SUITE.glob("test_*.py"):
        tree = ast.parse(file.read_text())
        tests = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert len(tests) == len(list(fault_table.faults(tree))), file.name

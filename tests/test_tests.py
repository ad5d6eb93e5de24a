"""The tests mirror the package, and no test file imports another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import flowgrpo_rc

TESTS = Path(__file__).parent
PACKAGE = Path(flowgrpo_rc.__file__).parent
TEST_FILES = sorted(TESTS.rglob("test_*.py"))

# Folders of tests that are no rooms of the package.
OTHERS = {
    "support",
    "end_to_end",
    "faults",
    "tagged_device",
    "docs",
    "scripts",
    "examples",
    "vllm_real",
    "vllm_omni_real",
}


def imported(file: Path) -> Iterator[str]:
    """Yields the full names that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_file_imports_another() -> None:
    modules = {file.stem for file in TEST_FILES} | {"conftest"}
    wrong = [
        f"{file.relative_to(TESTS)} imports {name}"
        for file in TESTS.rglob("*.py")
        for name in imported(file)
        if modules & set(name.split(".")) and not name.startswith("flowgrpo_rc.")
    ]
    assert wrong == []


def test_every_folder_of_tests_is_a_room_of_the_package() -> None:
    folders = {file.parent.relative_to(TESTS) for file in TEST_FILES}
    rooms = {folder for folder in folders if folder.parts and folder.parts[0] not in OTHERS}
    assert [str(room) for room in rooms if not (PACKAGE / room).is_dir()] == []


def test_conftest_files_hold_fixtures_and_hooks_alone() -> None:
    """What tests import is in tests/support."""
    wrong = [
        f"{file.relative_to(TESTS)}: {node.name}"
        for file in TESTS.rglob("conftest.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not node.name.startswith("pytest_")
        if not any("fixture" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    assert wrong == []

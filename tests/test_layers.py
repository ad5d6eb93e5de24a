"""Imports point down only, and a few more rules about the package's source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import rooms_figure
from rooms_figure import FLOORS, draw

import flowgrpo_rc

ROOT = Path(flowgrpo_rc.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What only some parts may import from outside.
RESTRICTED = {
    "diffusers": {"models", "policies", "rollout", "training", "exports"},
    "transformers": {"models", "policies", "rollout", "rewards", "training"},
    "hydra": {"config"},
    "omegaconf": {"config", "cli"},
    "accelerate": {"distributed", "records", "assembly"},
    "peft": {"models", "rollout"},
}
CORE_MAY_IMPORT = sys.stdlib_module_names | {"torch"}
# Modules of a process of its own, which nothing else imports at its top.
CHILD_ONLY = (
    "flowgrpo_rc.rollout.vllm_omni.host",
    "flowgrpo_rc.rollout.vllm_omni.pipelines",
    "flowgrpo_rc.rollout.vllm_omni.recorder",
    "flowgrpo_rc.rollout.vllm_omni.worker",
)
HEAVY = (
    "rapidocr",
    "wandb",
    "vllm",
    "vllm_omni",
    "pyarrow",
    "matplotlib.pyplot",
    "httpx2",
    "fastapi",
)


class Import(NamedTuple):
    """A module that a file imports, full dotted name; `typing_only` for what stands under
    TYPE_CHECKING.
    """

    file: Path
    line: int
    module: str
    typing_only: bool
    at_top: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports(file: Path) -> Iterator[Import]:
    tree = ast.parse(file.read_text())
    guards = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    typing_only = {id(child) for guard in guards for part in guard.body for child in ast.walk(part)}
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(file, node.lineno, name, id(node) in typing_only, id(node) not in inside)


def part_of(file: Path) -> str:
    """Returns the first folder below the package, or the module's own name."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


ALL = [found for file in FILES for found in imports(file)]


def test_the_reader_sees_imports():
    seen = {(part_of(found.file), found.module.split(".")[0]) for found in ALL}
    assert ("correction", "flowgrpo_rc") in seen
    assert ("models", "diffusers") in seen
    assert any(found.typing_only for found in ALL)
    assert any(not found.at_top for found in ALL)


def test_every_room_has_a_floor():
    assert {part_of(file) for file in FILES} - {"__init__"} == set(FLOOR)


def test_the_picture_of_the_rooms_is_up_to_date():
    page = Path(rooms_figure.__file__).parent
    assert (page / "figures" / "rooms.svg").read_text() == draw()


def test_no_import_points_up():
    wrong = []
    for found in ALL:
        own = part_of(found.file)
        names = found.module.split(".")
        if own == "__init__" or names[0] != "flowgrpo_rc" or names[1] == "__version__":
            continue
        if names[1] != own and FLOOR[names[1]] >= FLOOR[own]:
            wrong.append(str(found))
    assert wrong == []


def test_class_names_are_unique():
    names = Counter(
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_the_core_needs_only_torch_and_the_standard_library():
    outside = [
        str(found)
        for found in ALL
        if part_of(found.file) in ("core", "correction", "losses", "batch", "plugins")
        and found.module.split(".")[0] not in CORE_MAY_IMPORT | {"flowgrpo_rc"}
    ]
    assert outside == []


def test_frameworks_stay_where_they_belong():
    wrong = [
        str(found)
        for found in ALL
        for allowed in [RESTRICTED.get(found.module.split(".")[0])]
        if allowed is not None and part_of(found.file) not in allowed and not found.typing_only
    ]
    assert wrong == []


def test_heavy_optional_libraries_are_imported_where_they_are_set_up():
    heavy = tuple(f"{name}." for name in (*HEAVY, *CHILD_ONLY))
    wrong = [
        str(found)
        for found in ALL
        if found.at_top and not found.typing_only and f"{found.module}.".startswith(heavy)
        if not module_of(found.file).startswith(CHILD_ONLY)
    ]
    assert wrong == []


def test_importing_the_package_is_light():
    code = (
        f"import sys, flowgrpo_rc; print([name for name in {(*HEAVY, 'hydra', 'diffusers')!r} if "
        "name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_a_file_is_one_sitting():
    long = {
        str(file.relative_to(ROOT)): lines
        for file in FILES
        if (lines := len(file.read_text().splitlines())) > 500
    }
    assert long == {}


# A mode is an object. Its setting is read where it is declared, checked, chosen and made into one.
ASKS_THE_MODE = {
    "correction/config.py",
    "spec/run_spec.py",
    "spec/resolve.py",
    "calibration/choice.py",
    "algorithms/policy_gradient/objective.py",
    "monitoring/health_rules.py",
    "algorithms/policy_gradient/modes.py",
}


def test_nothing_else_asks_which_mode_it_is_in():
    asking = {
        str(file.relative_to(ROOT))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "bypass_mode"
    }
    assert asking == ASKS_THE_MODE


def test_every_public_name_has_a_docstring():
    lacking = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in FILES
        for node in public_names(ast.parse(file.read_text()))
        if ast.get_docstring(node) is None
    ]
    assert lacking == []


def public_names(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yields public classes and functions, and the public methods of public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    method
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
                )


def test_a_function_fits_a_screen():
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and (lines := node.end_lineno - node.lineno + 1 - docstring_lines(node)) > 60
    }
    assert long == {}


def docstring_lines(node: ast.FunctionDef) -> int:
    """Returns how many lines the docstring of a function has."""
    first = node.body[0]
    has_one = ast.get_docstring(node) is not None
    return first.end_lineno - first.lineno + 1 if has_one else 0


def test_the_training_room_is_one_sitting_a_file_and_one_evening():
    lines = [len(file.read_text().splitlines()) for file in (ROOT / "training").rglob("*.py")]
    assert sum(lines) <= 1950

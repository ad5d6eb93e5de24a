"""Prints what there is to carry: `make size` counts the tracked files of the working tree."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

KINDS = ("code", "docstring", "comment", "blank")
# Written by hand and read by a person, beside Python: tables, templates, styles and scripts.
OTHER_SOURCE = {".yaml", ".jinja", ".j2", ".html", ".css", ".js", ".sh"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
VENDORED = "flowgrpo_rc/report/uplot/"
# They say what happened to a value, not what it is.
VAGUE = {"found", "own", "given", "one", "told", "asked", "each", "parts", "kept", "here"}
MANY = 7  # parameters of a function that has too many


def count(path: Path) -> Counter[str]:
    """Returns how many lines of each kind a file has; all of a file that is not Python is code."""
    text = path.read_text()
    kinds = ["code" if line.strip() else "blank" for line in text.splitlines()]
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                kinds[token.start[0] - 1] = "comment"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                first, last = node.body[0].lineno, node.body[0].end_lineno
                kinds[first - 1 : last] = ["docstring"] * (last - first + 1)
    return Counter(kinds)


def habits(path: Path) -> Counter[str]:
    """Counts what makes code slow to read: errors, untyped and vague names, many parameters."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text())):
        name = ""
        if isinstance(node, ast.Raise):
            counts["raise"] += 1
        elif isinstance(node, ast.Name):
            counts["Any"] += node.id == "Any"
            name = node.id if isinstance(node.ctx, ast.Store) else ""
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.arguments):
            parameters = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            named = [p for p in parameters if p.arg not in ("self", "cls")]
            counts["many"] += len(named) >= MANY
        counts["bindings"] += bool(name)
        counts["vague"] += name in VAGUE
    return counts


def num_words(page: str) -> int:
    """Returns the words of a page; bars of tables and comments of HTML are none."""
    shown = re.sub(r"<!--.*?-->", " ", page, flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in re.split(r"[\s|]+", shown))


def room(path: Path, top: str) -> str:
    parts = path.relative_to(top).parts
    return parts[0] if len(parts) > 1 else "(top)"


def print_rooms(top: str, files: list[Path]) -> None:
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files:
        source = path.suffix == ".py" or path.suffix in OTHER_SOURCE
        if path.is_relative_to(top) and source and not path.is_relative_to(VENDORED):
            lines = count(path) + Counter(files=1)
            rooms[room(path, top)] += lines
            rooms["all"] += lines
    all_of_it = rooms.pop("all")
    print(f"{top:<14}{'files':>7}{'lines':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, lines in [*sorted(rooms.items()), ("all", all_of_it)]:
        total = sum(lines[kind] for kind in KINDS)
        row = f"{name:<14}{lines['files']:>7}{total:>8}"
        print(row + "".join(f"{lines[kind]:>11}" for kind in KINDS))
    print()


def print_habits(files: list[Path]) -> None:
    code = [path for path in files if path.is_relative_to("flowgrpo_rc") and path.suffix == ".py"]
    total = sum((habits(path) for path in code), Counter())
    lines = sum(len(path.read_text().splitlines()) for path in code)
    print(f"flowgrpo_rc, lines of Python: {lines}")
    for name in ("raise", "Any"):
        print(f"{name}: {total[name]}, {1000 * total[name] / lines:.1f} in 1,000 lines")
    print(f"functions of {MANY} parameters and more: {total['many']}")
    print(f"vague names: {total['vague'] / total['bindings']:.1%} of {total['bindings']} bindings")


def main() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    files = [path for path in map(Path, listed.splitlines()) if path.is_file()]
    for top in ("flowgrpo_rc", "tests"):
        print_rooms(top, files)
    print_habits(files)
    for top in ("tests", "examples"):
        lines = sum(
            len(path.read_text().splitlines())
            for path in files
            if path.is_relative_to(top) and path.suffix == ".py"
        )
        print(f"{top}, lines of Python: {lines}")
    docs = [path for path in files if path.match("docs/*.md")]
    read = [*docs, Path("README.md"), *(path for path in files if path.match("examples/*.md"))]
    words = sum(num_words(path.read_text()) for path in read)
    print(f"words of docs/, README.md and examples/*.md: {words}")
    print(f"pages in docs/: {len(docs)}")
    print(f"tracked files: {len(files)}")


if __name__ == "__main__":
    main()

"""Writes docs/verification.md: what was tested of each model and recipe, and when.

`make verification` runs the tests of docs/verification.yaml and keeps those that pass in
docs/verification.json. Given keys of features it runs their tests alone; given `page`, none.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from flowgrpo_rc.config.compose import config_folder
from flowgrpo_rc.models.architecture import unpack_architecture
from flowgrpo_rc.models.base import ModelConfig, adapter_of

DOCS = Path(__file__).parent
PAGE = DOCS / "verification.md"
STORE = DOCS / "verification.json"
ASKED = yaml.safe_load((DOCS / "verification.yaml").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, str] = ASKED["families"]
FEATURES: Mapping[str, Any] = ASKED["features"] | ASKED["of_recipes"]
# Recipes of published models, then those of bundled ones; verl_omni lies beneath a command line.
_FILES = [*config_folder().glob("experiment/*.yaml"), *config_folder().glob("*.yaml")]
RECIPES = {path.stem: f"`{path.stem}`" for path in sorted(_FILES) if path.stem != "verl_omni"}
VERSIONS = ("torch", "diffusers")


def run(keys: Sequence[str]) -> dict[str, Any]:
    """Runs the tests of features; returns what is kept of them. A failure ends the program."""
    tests = [test for key in keys for test in FEATURES[key]["tests"]]
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "--color=no", *tests]
    done = subprocess.run(command, cwd=DOCS.parent, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}nothing is written, since a test failed")
    passed = [line[7:] for line in done.stdout.splitlines() if line.startswith("PASSED tests/")]
    when = {"date": f"{datetime.date.today()}"} | {name: version(name) for name in VERSIONS}
    kept = {}
    for key in keys:
        own = [name for name in passed if name.partition("[")[0] in FEATURES[key]["tests"]]
        kept[key] = when | {"passed": sorted(own)}
    return kept


@cache
def names() -> dict[str, str]:
    """Returns what may stand in a test's parameters -> family or recipe."""
    found = {name: name for name in (*FAMILIES, *RECIPES)}
    for file in (config_folder() / "architectures").glob("*.json"):
        config = ModelConfig(path=str(unpack_architecture(file)))
        found[file.stem] = adapter_of(config).serves()
    return found


def row_of(test: str, key: str) -> str | None:
    """Returns the family or recipe that a test of a feature is about; None if it is no row."""
    function, _, parameters = test.rstrip("]").partition("[")
    if (row := FEATURES[key]["tests"][function]) != "by_name":
        return str(row)
    found = [name for name in names() if f"{parameters}-".startswith(f"{name}-")]
    return names()[max(found, key=len)] if found else None


def page(store: Mapping[str, Any]) -> Iterator[str]:
    """Yields the page for what is kept."""
    yield ASKED["introduction"] if ASKED["on_a_card"] else ASKED["introduction"] + ASKED["no_card"]
    yield from _table("model", FAMILIES, ASKED["features"], store)
    yield from _table("recipe", RECIPES, ASKED["of_recipes"], store)


def _table(
    of: str, rows: Mapping[str, str], features: Mapping[str, Any], store: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a section: a table with the features of each row, and below it their tests."""
    texts = {of: rows, "on a card": dict.fromkeys(rows, "no") | ASKED["on_a_card"]}
    for key, asked in features.items():
        texts[asked["title"]] = {row_of(test, key): "CPU" for test in store[key]["passed"]}
        texts[asked["title"]] |= dict.fromkeys(asked.get("not_for", ()), "-")
    yield f"\n## {of.title()}s\n\n| {' | '.join(texts)} |\n{'|---' * len(texts)}|\n"
    for row in rows:
        yield f"| {' | '.join(text.get(row, 'untested') for text in texts.values())} |\n"
    yield "\n| column | what passed | last run | tests |\n|---|---|---|---|\n"
    for key, asked in features.items():
        when = ", ".join([store[key]["date"], *(f"{name} {store[key][name]}" for name in VERSIONS)])
        tests = ", ".join(dict.fromkeys(f"`{test.rpartition('::')[2]}`" for test in asked["tests"]))
        passed = len(store[key]["passed"])
        yield f"| {asked['title']} | {asked['about']} | {when} | {passed}: {tests} |\n"


if __name__ == "__main__":
    keys = sys.argv[1:] or [key for key in FEATURES if key != "vllm_omni"]
    found = {} if keys == ["page"] else run(keys)
    kept = json.loads(STORE.read_text(encoding="utf-8")) | found
    STORE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text("".join(page(kept)), encoding="utf-8")

"""Writes docs/verification.md: what was tested of each model and recipe, and when.

`make verification` runs the tests of docs/verification.yaml and keeps those that pass in
docs/verification.json. Given keys of features it runs their tests alone; given `page`, none.
What ran on a card is written down in docs/on_a_card.json.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections import Counter
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
SPEC = yaml.safe_load((DOCS / "verification.yaml").read_text(encoding="utf-8"))
CARD = json.loads((DOCS / "on_a_card.json").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, str] = SPEC["families"]
FEATURES: Mapping[str, Any] = SPEC["features"] | SPEC["of_recipes"]
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
    results = {}
    for key in keys:
        of_feature = [name for name in passed if name.partition("[")[0] in FEATURES[key]["tests"]]
        results[key] = when | {"passed": sorted(of_feature)}
    return results


@cache
def names() -> dict[str, str]:
    """Returns what may stand in a test's parameters -> family or recipe."""
    rows = {name: name for name in (*FAMILIES, *RECIPES)}
    for file in (config_folder() / "architectures").glob("*.json"):
        config = ModelConfig(path=str(unpack_architecture(file)))
        rows[file.stem] = adapter_of(config).serves()
    return rows


def row_of(test: str, key: str) -> str | None:
    """Returns the family or recipe that a test of a feature is about; None if it is no row."""
    function, _, parameters = test.rstrip("]").partition("[")
    if (row := FEATURES[key]["tests"][function]) != "by_name":
        return str(row)
    matching = [name for name in names() if f"{parameters}-".startswith(f"{name}-")]
    return names()[max(matching, key=len)] if matching else None


def page(store: Mapping[str, Any]) -> Iterator[str]:
    """Yields the page for what is kept."""
    usual = Counter(_when(store[key]) for key in FEATURES).most_common(1)[0][0]
    yield SPEC["introduction"].format(usual=usual)
    yield from _models(store)
    yield "\n| column | what passed | tests |\n|---|---|---|\n"
    for key, feature in SPEC["features"].items():
        yield _tests_of(key, feature, store, usual)
    yield from _recipes(store)
    yield from _card()


def _models(store: Mapping[str, Any]) -> Iterator[str]:
    """Yields the table with the features of each family."""
    columns: dict[str, Mapping[str | None, str]] = {
        "model": FAMILIES,
        "on a card": CARD["families"],
    }
    for key, feature in SPEC["features"].items():
        passed = {row_of(test, key): "✓" for test in store[key]["passed"]}
        columns[feature["title"]] = passed | dict.fromkeys(feature.get("not_for", ()), "-")
    yield f"\n## Models\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for row in FAMILIES:
        yield f"| {' | '.join(column.get(row, '') for column in columns.values())} |\n"


def _tests_of(key: str, feature: Mapping[str, Any], store: Mapping[str, Any], usual: str) -> str:
    """Returns a row of the table of columns, with the date and versions if they are unusual."""
    files = ", ".join(dict.fromkeys(f"`{test.partition('::')[0]}`" for test in feature["tests"]))
    when = "" if _when(store[key]) == usual else f" ({_when(store[key])})"
    passed = len(store[key]["passed"])
    return f"| {feature['title']} | {feature['about']} | {passed}{when}: {files} |\n"


def _when(result: Mapping[str, str]) -> str:
    return ", ".join([result["date"], *(f"{name} {result[name]}" for name in VERSIONS)])


def _recipes(store: Mapping[str, Any]) -> Iterator[str]:
    """Yields the section that counts the recipes that passed, and names those that did not."""
    yield f"\n## Recipes\n\n{SPEC['recipes']}\n\n"
    for key, feature in SPEC["of_recipes"].items():
        asked = RECIPES.keys() - {*feature.get("not_for", ())}
        passed = asked & {row_of(test, key) for test in store[key]["passed"]}
        missing = ", ".join(RECIPES[name] for name in sorted(asked - passed))
        but = f"; untested: {missing}" if missing else ""
        yield f"* **{feature['title']}**, {len(passed)} of {len(asked)}: {feature['about']}{but}.\n"


def _card() -> Iterator[str]:
    """Yields the section of what ran on a card."""
    yield f"\n## On a card\n\nOn {CARD['card']} ({CARD['date']}, {CARD['versions']}).\n\n"
    for title in ("ran", "failed"):
        for text in CARD[title]:
            yield f"* {title.title()}: {text}.\n"
    yield f"* Not run: {', '.join(CARD['not_run'])}.\n"


if __name__ == "__main__":
    keys = sys.argv[1:] or [key for key in FEATURES if key != "vllm_omni"]
    results = {} if keys == ["page"] else run(keys)
    store = json.loads(STORE.read_text(encoding="utf-8")) | results
    STORE.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text("".join(page(store)), encoding="utf-8")

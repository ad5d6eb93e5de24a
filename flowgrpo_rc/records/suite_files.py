"""Writes what a suite leaves in a run's folder: numbers in JSON, samples beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.evaluation.intervals import LEVEL, Estimate, PolicyComparison
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.evaluation.suite_runner import SuiteResult
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import blaming, read_mapping

BASE = "base"  # ending of the names of sample files
TUNED = "lora"
_VALUES = ("mean", "low", "high")
_POLICIES = ("base", "tuned", "change")


class StoredResult(NamedTuple):
    """A result as it was written: `seeds` samples of each prompt, compared by column and group."""

    name: str
    prompts: int
    seeds: int
    comparisons: Mapping[str, PolicyComparison]
    groups: Mapping[str, PolicyComparison]


def sample_stem(folder: Path, name: str, policy: str) -> Path:
    """Returns the path of a suite's samples of a policy, BASE or TUNED, without its ending."""
    return folder / f"{name}_{policy}"


def write_suite_result(folder: Path, suite: Suite, result: SuiteResult) -> None:
    """Writes what the two policies got in a suite, in place of an older result."""
    folder.mkdir(exist_ok=True)
    row = {
        "suite": suite.name,
        "prompts": len(suite.prompts),
        "seeds": suite.seeds,
        "level": LEVEL,
        "comparisons": _written(result.comparisons),
        "groups": _written(result.groups),
        "texts": [prompt.text for prompt in suite.prompts],
        "scores": {
            policy: {
                name: [_finite(row) for row in values.tolist()]
                for name, values in scores.columns.items()
            }
            for policy, scores in ((BASE, result.base), (TUNED, result.tuned))
        },
    }
    write_atomic(folder / f"{suite.name}.json", json.dumps(row, allow_nan=False).encode())


def read_suite_results(folder: Path) -> Iterator[StoredResult]:
    """Reads the results of all suites, sorted by name; ValueError if a file is damaged."""
    for path in sorted(folder.glob("*.json")):
        row = read_mapping(path)
        with blaming(path):
            yield StoredResult(
                path.stem,
                int(row["prompts"]),
                int(row["seeds"]),
                _read(row["comparisons"]),
                _read(row["groups"]),
            )


def _written(comparisons: Mapping[str, PolicyComparison]) -> dict[str, Any]:
    return {
        name: {
            **{
                key: dict(zip(_VALUES, _finite(getattr(found, key)), strict=True))
                for key in _POLICIES
            },
            "count": found.num_prompts,
        }
        for name, found in comparisons.items()
    }


def _read(rows: Mapping[str, Any]) -> dict[str, PolicyComparison]:
    return {
        str(name): PolicyComparison(
            **{key: _estimate(row[key]) for key in _POLICIES}, num_prompts=int(row["count"])
        )
        for name, row in rows.items()
    }


def _estimate(row: Mapping[str, Any]) -> Estimate:
    return Estimate(*(math.nan if row[name] is None else float(row[name]) for name in _VALUES))


def _finite(values: Any) -> list[float | None]:
    """Returns None for what is not finite; JSON has no NaN."""
    return [float(value) if math.isfinite(value) else None for value in values]

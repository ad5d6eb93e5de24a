"""Writes what a suite leaves in a run's folder: numbers in JSON, samples beside it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flowgrpo_rc.evaluation.intervals import LEVEL, Estimate, PolicyComparison
from flowgrpo_rc.evaluation.suite import Suite, SuiteProtocol
from flowgrpo_rc.evaluation.suite_runner import SuiteResult, SuiteScores
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.reading import blaming, read_mapping
from flowgrpo_rc.records.metrics_file import Row, as_json

BASE = "base"  # ending of the names of sample files
TUNED = "lora"
_POLICIES = ("base", "tuned", "change")  # keys of a comparison in a file


class StoredResult(NamedTuple):
    """A result as it was written: `seeds` samples of each prompt, compared by column and group."""

    name: str
    prompts: int
    seeds: int
    protocol: SuiteProtocol
    comparisons: Mapping[str, PolicyComparison]
    groups: Mapping[str, PolicyComparison]


def sample_stem(folder: Path, name: str, policy: str) -> Path:
    """Returns the path of a suite's samples of a policy, BASE or TUNED, without its ending."""
    return folder / f"{name}_{policy}"


def write_suite_result(folder: Path, suite: Suite, result: SuiteResult) -> None:
    """Writes what the two policies got in a suite, in place of an older result."""
    row = {
        "suite": suite.name,
        "prompts": len(suite.prompts),
        "seeds": suite.seeds,
        "level": LEVEL,
        **result.protocol._asdict(),
        "comparisons": _written(result.comparisons),
        "groups": _written(result.groups),
        "texts": [prompt.text for prompt in suite.prompts],
        "scores": {BASE: _scores(result.base), TUNED: _scores(result.tuned)},
    }
    content = json.dumps(as_json(row), allow_nan=False)
    write_atomic(folder / f"{suite.name}.json", content.encode())


def read_suite_results(folder: Path) -> Iterator[StoredResult]:
    """Reads the results of all suites, sorted by name; ValueError if a file is damaged."""
    for path in sorted(folder.glob("*.json")):
        row = read_mapping(path)
        with blaming(path):
            yield StoredResult(
                path.stem,
                int(row["prompts"]),
                int(row["seeds"]),
                SuiteProtocol(row["sampler"], str(row["digest"])),
                _read(row["comparisons"]),
                _read(row["groups"]),
            )


def _scores(scores: SuiteScores) -> dict[str, list[list[float]]]:
    return {name: values.tolist() for name, values in scores.columns.items()}


def _written(comparisons: Mapping[str, PolicyComparison]) -> dict[str, Row]:
    return {
        name: {policy: getattr(comparison, policy)._asdict() for policy in _POLICIES}
        | {"count": comparison.num_prompts}
        for name, comparison in comparisons.items()
    }


def _read(rows: Mapping[str, Row]) -> dict[str, PolicyComparison]:
    comparisons = {}
    for name, row in rows.items():
        base, tuned, change = (_estimate(row[policy]) for policy in _POLICIES)
        comparisons[str(name)] = PolicyComparison(base, tuned, change, int(row["count"]))
    return comparisons


def _estimate(row: Row) -> Estimate:
    ends = (row[end] for end in Estimate._fields)
    return Estimate(*(math.nan if end is None else float(end) for end in ends))

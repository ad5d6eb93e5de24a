"""metrics.jsonl: its lines, a torn last line, a full disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flowgrpo_rc.records.metrics_file import MetricsFile


def test_rows_are_sorted_json_lines(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.rows() == []
    file.append(0, {"val/reward": 0.25, "b": math.inf, "c": -math.inf, "d": math.nan})
    file.append(1, {"reward/mean": 0.1 + 0.2, "actor/lr": 1e-7, "count": 3})
    text = file.path.read_text()
    assert text == (
        '{"b": null, "c": null, "d": null, "step": 0, "val/reward": 0.25}\n'
        '{"actor/lr": 1e-07, "count": 3, "reward/mean": 0.30000000000000004, "step": 1}\n'
    )
    assert file.rows() == [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("torn", [b'{"step": 3}', b'{"step": 3, "a": "\xc3', b"\x00" * 9])
def test_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    complete = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(complete + torn)
    file = MetricsFile(path)
    assert [row["step"] for row in file.rows()] == [1, 2]
    file.append(3, {"a": 1.0})
    assert path.read_bytes() == complete + b'{"a": 1.0, "step": 3}\n'


def test_every_cut_of_the_file_can_be_resumed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(1)
    assert list(tmp_path.iterdir()) == []
    for step in (0, 1, 1, 2):
        file.append(step, {"a": step / 3})
    whole = file.path.read_bytes()
    for size in range(len(whole)):
        file.path.write_bytes(whole[:size])
        file.truncate_after(1)
        rows = len(file.rows())
        for step in (0, 1, 1, 2)[rows:]:
            file.append(step, {"a": step / 3})
        assert file.path.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        MetricsFile(path).rows()
    assert len(path.read_text().splitlines()) == 3


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write the metrics.*No space left.*metrics\.jsonl"):
        MetricsFile(path).append(1, {"a": 1.0})

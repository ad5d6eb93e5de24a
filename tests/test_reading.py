"""Small JSON files of others are read within bounds, and errors name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_rc.reading import blaming, parse_mapping, read_mapping


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def test_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text('{"a": [1, {"b": null}]}')
    assert read_mapping(path) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"5", b"\xff\xff", nested(10**5).encode()])
def test_what_is_no_mapping(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "found.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} cannot be read: "):
        read_mapping(path)


def test_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with path.open("wb") as file:
        file.truncate(2**27)
    with pytest.raises(ValueError, match="more than 64 MiB"):
        read_mapping(path)


def test_levels() -> None:
    assert parse_mapping(nested(100))
    for levels in (101, 10**5):
        with pytest.raises(ValueError, match="deeper than 100 levels"):
            parse_mapping(nested(levels))


def test_blame() -> None:
    with pytest.raises(ValueError, match=r"^file cannot be read: 'a' is missing$"), blaming("file"):
        raise KeyError("a")
    with pytest.raises(ValueError, match=r"^file cannot be read: RuntimeError$"), blaming("file"):
        raise RuntimeError
    with pytest.raises(OSError, match=r"^the file is gone$"), blaming("file"):
        raise OSError("the file is gone")

"""Paths of bundled files, as a run's folder holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_rc import assets

HERE = str(assets.path("tiny_clip"))
GONE = "/no/such/flowgrpo_rc/assets/prompts/glyph_val.txt"


def test_only_paths_of_bundled_files_become_references() -> None:
    beside = str(assets.ROOT / "no_such_model")
    tree = {"a": [HERE, "prompts.txt", 3], "b": {"c": beside, "d": None, "e": GONE}}
    expected = {"a": ["${asset:tiny_clip}", "prompts.txt", 3], "b": dict(tree["b"])}
    assert assets.with_references(tree) == expected


def test_an_installation_that_is_gone_gives_way_to_this_one(tmp_path: Path) -> None:
    other = tmp_path / "flowgrpo_rc" / "assets" / "tiny_clip"
    other.mkdir(parents=True)
    paths = [HERE, GONE, str(other), "/no/such/flowgrpo_rc/assets/other"]
    lost = [HERE, "${asset:prompts/glyph_val.txt}", *paths[2:]]
    assert assets.with_lost_references(paths) == lost
    everywhere = ["${asset:tiny_clip}", lost[1], "${asset:tiny_clip}", paths[3]]
    assert assets.with_all_references(paths) == everywhere


@pytest.mark.parametrize("name", ["tiny_clip", "prompts/glyph_val.txt"])
def test_a_reference_leads_back_to_the_path(name: str) -> None:
    assert assets.with_references(str(assets.path(name))) == f"${{asset:{name}}}"

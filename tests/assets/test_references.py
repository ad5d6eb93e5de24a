"""Paths of bundled files, as a run's folder holds them."""

from __future__ import annotations

import pytest

from flowgrpo_rc import assets

HERE = str(assets.path("tiny_clip"))
OTHER = "/no/such/flowgrpo_rc/assets/prompts/glyph_val.txt"


def test_only_paths_of_bundled_files_become_references() -> None:
    beside = str(assets.ROOT / "no_such_model")
    tree = {"a": [HERE, "prompts.txt", 3], "b": {"c": beside, "d": None, "e": OTHER}}
    expected = {"a": ["${asset:tiny_clip}", "prompts.txt", 3], "b": dict(tree["b"])}
    assert assets.with_references(tree) == expected


@pytest.mark.parametrize("name", ["tiny_clip", "prompts/glyph_val.txt"])
def test_a_reference_leads_back_to_the_path(name: str) -> None:
    assert assets.with_references(str(assets.path(name))) == f"${{asset:{name}}}"

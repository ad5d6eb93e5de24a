"""A mapping on the command line or from Python replaces what its key held; a file's joins it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.compositions import checked_config, resolved

from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.from_python import override_lines
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.rewards.manager import build_terms
from flowgrpo_rc.spec.check_inputs import prompts_of

ALONE = {"jpeg": {"weight": 1}}


def terms(*overrides: str, **where: str) -> dict[str, Any]:
    return checked_config(compose_config(overrides, **where)).reward.terms


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["reward.terms={jpeg: {weight: 1}}"], ALONE),
        (override_lines({"reward.terms": ALONE}), ALONE),
        (["reward.terms={jpeg: {objective: 'incompressibility'}}", "reward.terms.jpeg.weight=1"],
         {"jpeg": {"objective": "incompressibility", "weight": 1}}),
        (["reward.terms.ocr.weight=2", "reward.terms={jpeg: {weight: 1}}"], ALONE),
        (["reward.terms={ocr: {threads: 2}}", "reward.terms.ocr={weight: 2}"],
         {"ocr": {"weight": 2}}),
        (["reward.terms.jpeg.weight=1", "reward.terms={ocr: {weight: 1}}",
          "reward.terms.jpeg.weight=1"], {"ocr": {"weight": 1}} | ALONE),
    ],
)  # fmt: skip
def test_a_mapping_of_rewards_replaces_those_of_the_file(
    overrides: list[str], found: dict[str, Any]
) -> None:
    assert terms(*overrides) == found


def test_no_rewards_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"reward\.terms has no reward, .*reward\.terms=\{pickscore"
    ):
        terms("reward.terms={}")


def test_a_file_is_joined_with_the_one_that_it_builds_on(tmp_path: Path) -> None:
    """Key by key, as Hydra composes them; a mapping of the command line replaces the file's."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [tiny_ocr, _self_]\nreward: {terms: {jpeg: {weight: 1}}}\n"
        "rollout: {engine_kwargs: {one: 1}}\n"
    )
    where = {"config_dir": str(tmp_path), "config_name": "mine"}
    assert terms(**where).keys() == {"ocr", "jpeg"}
    for line, found in (("={two: 2}", {"two": 2}), (".two=2", {"one": 1, "two": 2})):
        composed = compose_config([f"rollout.engine_kwargs{line}"], **where)
        assert composed.rollout.engine_kwargs == found


def test_it_replaces_the_rewards_of_a_run_that_is_evaluated(tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(OmegaConf.to_yaml(compose_config([])))
    assert stored_config(stored, ["reward.terms={jpeg: {weight: 1}}"]).reward.terms == ALONE
    with pytest.raises(ValueError, match="has no reward"):
        build_terms(stored_config(stored, ["reward.terms={}"]).reward)


def test_who_needs_a_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text("a cat\n")
    config = checked_config(compose_config([f"data.train_files={tmp_path / 'cats.txt'}"]))
    with pytest.raises(ValueError, match=r"has no target; reward\.terms\.ocr needs one"):
        prompts_of(resolved(config))

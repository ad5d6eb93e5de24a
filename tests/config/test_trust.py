"""Which settings of a run's folder name code or secrets, and which only look like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.config.trust import check_plain, check_trusted

RUN = Path("run") / "config.yaml"


def of_rewards(terms: dict[str, object]) -> Config:
    config = Config()
    config.reward.terms = terms
    return config


@pytest.mark.parametrize(
    "terms",
    [
        {"ocr": {}, "jpeg": None},
        {"mine": {"_target_": "flowgrpo_rc.rewards.jpeg.Jpeg"}},
        {"large.clip": {"_target_": "clip", "path": "openai/clip-vit-large-patch14"}},
        {"clip": {"path": "/models/clip:1"}},
        {"dark": {"_target_": "function", "path": "given:dark"}},
    ],
)
def test_what_this_package_has_is_trusted(terms: dict[str, object]) -> None:
    check_trusted(RUN, of_rewards(terms), "--trust")


def test_everything_else_is_listed() -> None:
    config = of_rewards(
        {
            "a": {"_target_": "other.A"},
            "b": {"_target_": "flowgrpo_rc_other.B"},
            "c": {"_target_": "function", "path": "flowgrpo_rc.redaction:redact"},
        }
    )
    config.rollout.name = "other.Engine"
    config.trainer.suites = ["words", "mine.yaml", "ocr:private.txt"]
    with pytest.raises(ValueError, match="asks for code") as found:
        check_trusted(RUN, config, "--trust")
    listed = (
        "rollout.name=other.Engine, reward.terms.a._target_=other.A, "
        "reward.terms.b._target_=flowgrpo_rc_other.B, "
        "reward.terms.c.path=flowgrpo_rc.redaction:redact, trainer.suites=mine.yaml, "
        "trainer.suites=ocr:private.txt."
    )
    assert listed in str(found.value)


@pytest.mark.parametrize(
    "text", ["a: ${oc.env:HOME}", "a: [1, '${b}']", "a: {b: 'x ${asset:c} ${hydra:d}'}"]
)
def test_values_that_stand_for_others(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="stands for another value"):
        check_plain(path)


def test_bundled_files_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: ${asset:tiny_clip}\nb: [$5, '{x}']\n")
    check_plain(path)

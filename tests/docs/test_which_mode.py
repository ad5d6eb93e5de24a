"""docs/which_mode.md is one screen, names metrics that exist, and its settings compose."""

from __future__ import annotations

import re

import pytest
from support.documented import ROOT

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.monitoring.metric_names import SECTIONS

PAGE = ROOT / "docs" / "which_mode.md"
TEXT = PAGE.read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")][1:]
PREFIX = "algorithm.rollout_correction."


def settings() -> list[str]:
    """Returns the settings of the second column, as they stand on a command line."""
    named = [code for row in ROWS for code in re.findall(r"`([^`]+=[^`]+)`", row[1])]
    return sorted({*named, "algorithm.rollout_correction=disabled"})


def test_the_page_is_one_screen() -> None:
    assert len(TEXT.splitlines()) <= 60
    assert len(TEXT.split()) < 350


def test_every_metric_of_a_symptom_exists() -> None:
    known = {metric.name.rpartition("/")[2] for section in SECTIONS for metric in section.metrics}
    shown = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert len(shown) > 8
    assert shown - known == set()


@pytest.mark.parametrize("setting", settings())
def test_every_setting_composes(setting: str) -> None:
    overrides = [f"{PREFIX}{word}" if re.match(r"\w+=", word) else word for word in setting.split()]
    name = "token_grpo" if re.search("seq_|geo_|disabled", setting) else "tiny_ocr"
    to_config(compose_config(overrides, config_name=name))

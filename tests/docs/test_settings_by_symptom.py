"""The table of settings by symptom names metrics that exist, and its settings compose."""

from __future__ import annotations

import re

import pytest
from metric_names import SECTIONS
from support.compositions import checked_config
from support.documented import ROOT

from flowgrpo_rc.config.compose import compose_config

TEXT = (ROOT / "docs" / "rollout_correction.md").read_text()
TABLE = TEXT.partition("## Which setting\n")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]
PREFIX = "algorithm.rollout_correction."
SETTINGS = sorted({code for row in ROWS for code in re.findall(r"`([^`]+=[^`]+)`", row[1])})


def test_every_metric_of_a_symptom_exists() -> None:
    known = {metric.name.rpartition("/")[2] for section in SECTIONS for metric in section.metrics}
    shown = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert len(shown) > 8
    assert shown - known == set()


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_composes(setting: str) -> None:
    overrides = [f"{PREFIX}{word}" if re.match(r"\w+=", word) else word for word in setting.split()]
    name = "token_grpo" if re.search("seq_|geo_|disabled", setting) else "tiny_ocr"
    checked_config(compose_config(overrides, config_name=name))

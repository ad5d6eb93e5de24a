"""A duration is taken wherever a time in seconds is."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.compositions import checked_config

from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.from_python import override_lines
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.evaluation.suite import read_suite
from flowgrpo_rc.plugins import in_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90m", 5400), ("30s", 30), ("1h30m", 5400), ("1.5h", 5400), ("1d", 86400)],
)
def test_a_duration_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert in_seconds("trainer.max_time", text) == in_seconds("x.timeout_s", text) == seconds


def test_a_command_and_python_take_durations() -> None:
    assert compose_config(["trainer.max_time=90m"]).trainer.max_time == 5400
    assert compose_config(override_lines({"trainer.timeout_s": "1h"})).trainer.timeout_s == 3600


@pytest.mark.parametrize("text", ["2hours", "1h-", "h2", "5 m"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_time"):
        checked_config(compose_config([f"trainer.max_time='{text}'"]))


def test_other_keys_and_other_values_stay() -> None:
    kept = {"trainer": {"experiment_name": "2h", "max_time": None, "timeout_s": 3}}
    assert in_seconds("", kept) == kept
    assert in_seconds("x.max_time", "${trainer.timeout_s}") == "${trainer.timeout_s}"


def test_options_of_rewards_and_engines_and_files_take_one(tmp_path: Path) -> None:
    remote = "reward.terms={remote: {url: 'http://127.0.0.1:1', deadline_s: 2m}}"
    composed = compose_config([remote, "rollout.engine_kwargs.timeout_s=10m"])
    assert composed.reward.terms.remote.deadline_s == 120
    assert composed.rollout.engine_kwargs.timeout_s == 600
    (tmp_path / "mine.yaml").write_text("trainer: {max_time: 2h}\nreward: {timeout_s: 5m}\n")
    of_file = compose_config([], config_dir=str(tmp_path), config_name="mine")
    assert (of_file.trainer.max_time, of_file.reward.timeout_s) == (7200, 300)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(of_file))
    assert stored_config(tmp_path / "config.yaml", ["reward.timeout_s=1h"]).reward.timeout_s == 3600
    with pytest.raises(ValueError, match=r"heigth=64 .did you mean 'rollout\.val_kwargs\.height'"):
        stored_config(tmp_path / "config.yaml", ["rollout.val_kwargs.heigth=64"])
    suite = tmp_path / "suite.yaml"
    (tmp_path / "words.txt").write_text('"A"\n"B"\n')
    suite.write_text("prompts: words.txt\nreward: {terms: {jpeg: {}}, timeout_s: 2m}\n")
    assert read_suite(str(suite)).reward.timeout_s == 120

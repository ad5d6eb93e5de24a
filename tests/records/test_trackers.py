"""Which loggers are refused."""

from __future__ import annotations

import importlib.util

import pytest

from flowgrpo_rc.records.trackers import accelerate_loggers, validate_loggers


def test_unknown_logger_is_refused_with_what_is_allowed() -> None:
    validate_loggers(["console", "wandb", "tensorboard"])
    with pytest.raises(
        ValueError, match="'wandbb' is unknown; allowed are console, wandb, tensorboard"
    ):
        validate_loggers(["console", "wandbb"])


def test_logger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate_loggers(["console"])
    with pytest.raises(ValueError, match=r"needs the package tensorboard.*pip install tensorboard"):
        validate_loggers(["tensorboard"])


def test_the_console_is_not_a_logger_of_accelerate() -> None:
    assert accelerate_loggers(["console", "wandb", "wandb"]) == ["wandb"]

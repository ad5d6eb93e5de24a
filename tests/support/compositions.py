"""Configurations as the command line composes them, each composed once."""

from __future__ import annotations

from functools import cache

from omegaconf import DictConfig

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config


@cache
def composed(*overrides: str) -> DictConfig:
    return compose_config(list(overrides))


def config_of(*overrides: str, num_processes: int | None = None) -> Config:
    """Returns a configuration of the test's own, which it may change."""
    return to_config(composed(*overrides), num_processes=num_processes)

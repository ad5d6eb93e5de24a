"""Configurations as the command line composes them, each composed once."""

from __future__ import annotations

import copy
from functools import cache

import torch
import yaml
from omegaconf import DictConfig

from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.child import launched_processes
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import Machine, RunSpec


@cache
def composed(*overrides: str) -> DictConfig:
    return compose_config(list(overrides))


def config_of(*overrides: str, num_processes: int | None = None) -> Config:
    """Returns a checked configuration of the test's own, which it may change."""
    return checked_config(composed(*overrides), num_processes=num_processes)


def job(*settings: str, of: Config | None = None) -> Config:
    """Returns a configuration with settings, `key=value`, as if they had been composed.

    That takes a tenth of the time of a composition. Nothing is translated or checked.

    Args:
      settings: keys of this project; a key below a mapping may be new.
      of: the configuration to copy; the bundled job if it is left out.
    """
    config = copy.deepcopy(bundled() if of is None else of)
    for setting in settings:
        key, _, text = setting.partition("=")
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = (
                place.setdefault(section, {}) if isinstance(place, dict) else vars(place)[section]
            )
        values = place if isinstance(place, dict) else vars(place)
        values[name] = yaml.safe_load(text)
    return config


@cache
def bundled() -> Config:
    """The bundled job; nobody changes it."""
    return config_of()


def checked_config(composition: DictConfig, *, num_processes: int | None = None) -> Config:
    """Returns the dataclasses of a composed configuration, whose settings go together."""
    config = to_config(composition)
    check_settings(resolved(config, num_processes or launched_processes() or 1))
    return config


def resolved(config: Config, num_processes: int = 1, device: str = "cpu") -> RunSpec:
    """Returns the run spec of a configuration on so many processes of a device."""
    return resolve(config, Machine(torch.device(device), num_processes))


def spec_of(*overrides: str, num_processes: int = 1, device: str = "cpu") -> RunSpec:
    """Returns the run spec of overrides of the bundled job."""
    return resolved(config_of(*overrides), num_processes, device)


def job_spec(*settings: str, device: str = "cpu") -> RunSpec:
    """Returns the run spec of the bundled job with settings, as of `job`."""
    return resolved(job(*settings), device=device)

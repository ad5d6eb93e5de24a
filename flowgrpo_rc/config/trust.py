"""Checks of a configuration that comes from a run's folder.

It may name code and secrets as that of a command line does, but it may be somebody else's.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.thresholds import KEY
from flowgrpo_rc.evaluation.suite import bundled_suites
from flowgrpo_rc.files import plain_yaml
from flowgrpo_rc.losses.base import DIFFUSION_KEY, TOKEN_KEY
from flowgrpo_rc.records.run_folder import flat_settings
from flowgrpo_rc.redaction import REDACTED
from flowgrpo_rc.rewards.function import GIVEN

_OWN = "flowgrpo_rc."
# The path of a function. Nothing of this package is named in this way, but by class or module.
_FUNCTION = re.compile(r"[\w.]+:\w+")
# The only interpolation that a run writes.
_ASSET = "${asset:"


def check_plain(path: Path) -> None:
    """Raises ValueError if a run's config.yaml reads another value, as `${oc.env:TOKEN}` does."""
    for key, value in flat_settings(plain_yaml(path)).items():
        if "${" in str(value).replace(_ASSET, ""):
            raise ValueError(
                f"{path}: {key}={value} stands for another value, such as one of the environment, "
                "and a run writes values alone: put the value there"
            )


def check_secrets(config: Config) -> None:
    """Raises ValueError if options of rewards are `***`, which a run's folder has for a secret."""
    options = flat_settings(config.reward.terms, "reward.terms")
    missing = [key for key, value in options.items() if REDACTED in str(value)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: a run's folder holds no secrets, only {REDACTED} in their "
            f"place: give them again, as in {missing[0]}=..."
        )


def check_trusted(path: Path, config: Config, how: str) -> None:
    """Raises ValueError, with the settings, if a run asks for code from outside of this package, a
    secret or a server; nothing is imported.

    A server would be sent the prompts, which may be any file of this machine.
    """
    settings = [*_code(config), *_reward_options(config, "token_env")]
    settings += _reward_options(config, "url")
    # A suite's file may name code and servers, too.
    own_suites = [suite for suite in config.trainer.suites if suite not in bundled_suites()]
    settings += [("trainer.suites", suite) for suite in own_suites]
    if settings:
        listed = ", ".join(f"{key}={value}" for key, value in settings)
        raise ValueError(
            f"{path} asks for code from outside of flowgrpo_rc, for secrets of this machine or for "
            f"a server that would be sent the prompts: {listed}. If the folder is yours, or you "
            f"have read that code, give {how}"
        )


def _code(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, name) of the code outside of this package."""
    correction = config.algorithm.rollout_correction
    names = {
        "rollout.name": config.rollout.name,
        "model.adapter": config.model.adapter or "",
        f"{KEY}.custom_correction": correction.custom_correction or "",
        f"{DIFFUSION_KEY}.loss_mode": config.actor.diffusion_loss.loss_mode,
        f"{TOKEN_KEY}.loss_mode": config.actor.token_loss.loss_mode,
    }
    names |= {f"reward.terms.{name}._target_": name for name in config.reward.terms}
    names |= dict(_reward_options(config, "_target_"))
    for key, name in names.items():
        if ":" in name or ("." in name and not name.startswith(_OWN)):
            yield key, name
    for key, function in _reward_options(config, "path"):
        if _FUNCTION.fullmatch(function) and not function.startswith(GIVEN):
            yield key, function


def _reward_options(config: Config, option: str) -> Iterator[tuple[str, str]]:
    """Yields (key, value) of an option of the rewards that have it."""
    for name, term in config.reward.terms.items():
        if isinstance(term, dict) and term.get(option) is not None:
            yield f"reward.terms.{name}.{option}", str(term[option])

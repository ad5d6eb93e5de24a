"""The table `foreign.yaml`: what each key of another system is here."""

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

import yaml

# Begins a key of verl-omni that may be written without it.
PREFIX = "actor_rollout_ref."


# The fields of a row, which the head of the table explains.
Fields = TypedDict(
    "Fields",
    {
        "to": str,
        "values": Mapping[object, object],
        "as": str,
        "set": Mapping[str, object],
        "unsaid": Mapping[str, object],
        "same": Collection[object],
        "at": Mapping[object, "str | Fields"],
        "stop": str,
        "loss": str,
        "unread": Collection[str],
        "unless": Collection[str],
        "if": str,
        "else": "str | Fields",
        "why": str,
        "rule": str,
        "value": str,
        "switch": str,
    },
    total=False,
)


class ForeignReward(TypedDict, total=False):
    """The reward here that scores as a file of verl-omni does: its name is `name`."""

    name: str
    divisor: float
    url: str
    why: str


class Foreign(TypedDict):
    """The table: the row of each key, or why none is needed, by the system that it belongs to."""

    verl_omni: Mapping[str, str | Fields]
    unsaid: Mapping[str, object]
    loggers: Collection[object]
    rewards: Mapping[str, ForeignReward]
    verl: Mapping[str, Fields]
    slime: Mapping[str, str | Fields]
    peers: Mapping[str, str]


@cache
def foreign() -> Foreign:
    """Reads the table."""
    text = Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8")
    table: Foreign = yaml.safe_load(text)
    return table


def row_of(key: str) -> str | Fields | None:
    """Returns the row of a key of verl-omni, or of the nearest section above; None without one."""
    rows = foreign()["verl_omni"]
    section = key
    while section and section not in rows:
        section = section.rpartition(".")[0]
    row = rows.get(section)
    # What has a counterpart is no section.
    is_key = isinstance(row, dict) and "to" in row
    return None if section != key and is_key else row


def own_key(name: str) -> str | None:
    """Says how to set what another program calls so, in a section or not; None if none does."""
    peers = foreign()["peers"]
    return peers.get(name) or peers.get(name.rpartition(".")[2])


def mapping_of(path: Path, name: str) -> dict[str, object]:
    """Reads a YAML file of the user; ValueError with its name if it holds no mapping."""
    # Here and not at the top: the command line reads the table before anything heavy is imported.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{name} must hold a mapping of keys")
    return {str(key): value for key, value in tree.items()}

"""Every name of the four documents and of verl 0.9.1 is on docs/migrating.md.

The names are written down here. A name that the page leaves out, or that nothing answers to, fails.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from support.builders import log_probs
from support.compositions import checked_config

import flowgrpo_rc
from flowgrpo_rc import DiffusionBatch, RolloutCorrectionConfig
from flowgrpo_rc.config.compose import compose_all
from flowgrpo_rc.config.translate_correction import KNOWN_KEYS, OWN_KEYS, rollout_correction
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.config import LOSS_TYPES
from flowgrpo_rc.correction.metric_names import SLIME_FRACTIONS, SLIME_NAMES
from flowgrpo_rc.correction.presets import PRESETS
from flowgrpo_rc.correction.thresholds import CRITERIA, IS_MODES, OLDER_NAMES
from flowgrpo_rc.correction.weights import IS_LEVELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"
SECTION = "algorithm.rollout_correction"
HEADERS = ("|there|in|here|remark|", "|there|here|remark|")  # the second is of slime alone

# --- The tables of the page


class Row(NamedTuple):
    """A row of the page.

    `here` holds our names; those of `there` if it says `same`, none if it says `none`.
    """

    section: str
    there: list[str]
    here: list[str]


def rows() -> Iterator[Row]:
    section = ""
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        inside = line.startswith("|") and (inside or line in HEADERS)
        if not inside or line.startswith(("|---", "|there|")):
            continue
        there, *_, here, _ = (cell.strip() for cell in line[1:-1].split("|"))
        quoted = re.findall(r"`([^`]+)`", here)
        assert quoted or here in ("same", "none"), line
        found = re.findall(r"`([^`]+)`", there)
        yield Row(section, found, found if here == "same" else quoted)


ROWS = list(rows())


def names(section: str) -> list[str]:
    """Returns the names of the documents in a section of the page, without repetition."""
    return list(dict.fromkeys(name for row in ROWS if row.section == section for name in row.there))


def test_the_page_has_every_name_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    flags = {flag.removeprefix("--").replace("-", "_") for flag in names("slime's flags")}
    for name in (*KNOWN_KEYS, *PRESETS):
        assert f"`{name}`" in page or name in flags, name
    renamed = {"ois": "ratio_mean"}
    for table in (SLIME_NAMES, *SLIME_FRACTIONS.values()):
        renamed |= {slime: ours for ours, slime in table.items()}
    slime = [row for row in ROWS if row.section == "slime's metrics"]
    assert renamed == {
        new: ours for row in slime for new, ours in zip(row.there, row.here, strict=True)
    }


ALLOWED = {
    "rollout_is": IS_LEVELS,
    "rollout_is_mode": IS_MODES,
    "rollout_rs": CRITERIA,
    "loss_type": LOSS_TYPES,
}


def exists(section: str, name: str) -> bool:
    """Says whether a name in the column `here` of a section is one of ours."""
    if section in ("Keys of a section", "slime's flags", "Values"):
        key, _, value = name.partition("=")
        if value not in ("", "null") and key in ALLOWED:
            return value in ALLOWED[key]
        return key in (*OWN_KEYS, "custom_config_path", "actor.rollout_correction") or in_config(
            key
        )
    if section == "Presets":
        return name in PRESETS
    if section == "Functions and classes":
        return name in flowgrpo_rc.__all__
    if section == "Scripts":
        return (ROOT / name).is_file()
    if section == "Arguments and results":
        function = flowgrpo_rc.compute_rollout_correction_and_rejection_mask
        results = function(*[torch.zeros(1, 1)] * 3)._asdict()
        return name in {
            *inspect.signature(function).parameters,
            *results,
            *DiffusionBatch.__dataclass_fields__,
        }
    return name == "ratio_mean" or name.format(criterion="token_k1") in MEASURED


def in_config(path: str) -> bool:
    node: Any = Config()
    for part in path.split("."):
        if part not in vars(node):
            return False
        node = vars(node)[part]
    return True


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.there[0])
def test_the_names_in_the_column_here_exist(row: Row) -> None:
    for name in row.here:
        assert exists(row.section, name), name


# --- Keys, flags and values are translated

BYPASS, REINFORCE = "bypass_mode=true", "loss_type=reinforce"
PURE, UPPER = "use_pure_rollout_correction", "rs_upper_bound=3.0"
TOKEN, BAND = "rollout_is=token", "rollout_rs_threshold=2.0"
# Settings as a document writes them, and what differs from the defaults here; None: the same.
TRANSLATED: list[tuple[str, str | None]] = [
    (BYPASS, None),
    ("bypass_old_logprob_for_rollout=true", BYPASS),
    (f"{BYPASS} {REINFORCE}", None),
    (f"{BYPASS} loss_type=ppo_clip", BYPASS),
    (f"bypass_old_logprob_for_rollout=true {PURE}=true", f"{BYPASS} {REINFORCE}"),
    (f"bypass_old_logprob_for_rollout=false {PURE}=false", ""),
    (f"{BYPASS} use_policy_gradient=true", f"{BYPASS} {REINFORCE}"),
    ("rollout_is=null rollout_rs=null", ""),
    (f"{TOKEN} rollout_is_threshold=3.0", None),
    ("rollout_is=sequence", None),
    (f"{TOKEN} rollout_is_batch_normalize=true", None),
    (f"{TOKEN} rollout_is_threshold=0.5_5.0", None),
    *((f"rollout_rs={n} {BAND} rollout_rs_threshold_lower=0.4", None) for n in OLDER_NAMES),
    *((f"rollout_rs={name} {BAND}", None) for name in CRITERIA),
    ("rollout_token_veto_threshold=1.0e-4", None),
    ("use_tis=true", TOKEN),
    ("use_rollout_correction=true", TOKEN),
    ("use_tis=false", ""),
    ("use_rollout_logprobs=true", BYPASS),
    ("use_rollout_logprobs=false use_rollout_correction=false", ""),
    ("use_rollout_logprobs=true use_rollout_correction=true", f"{TOKEN} {BYPASS}"),
    ("get_mismatch_metrics=true", ""),
    (
        "custom_tis_function_path=support.builders.drop_odd",
        "custom_correction=support.builders:drop_odd",
    ),
    *(
        (f"use_tis=true {prefix}_{there}", here)
        for prefix in ("tis", "mis")
        for there, here in (
            ("level=token", TOKEN),
            ("level=sequence", "rollout_is=sequence"),
            ("level=geometric", "rollout_is=geometric"),
            ("mode=truncate", f"{TOKEN} rollout_is_mode=truncate"),
            ("upper_bound=3.0", f"{TOKEN} rollout_is_threshold=3.0"),
            ("batch_normalize=true", f"{TOKEN} rollout_is_batch_normalize=true"),
        )
    ),
    *(
        (
            f"use_tis=true {prefix}_mode={mode} {prefix}_lower_bound=0.4 {prefix}_upper_bound=3.0",
            f"{TOKEN} rollout_is_mode={mode} rollout_is_threshold=0.4_3.0",
        )
        for prefix in ("tis", "mis")
        for mode in ("clip", "mask")
    ),
    ("use_tis=true tis_clip=3.0 tis_clip_low=0", f"{TOKEN} rollout_is_threshold=3.0"),
    (
        "use_tis=true tis_clip_low=0.4 custom_tis_function_path=a.mis.compute_mis_weights_with_cp",
        f"{TOKEN} rollout_is_mode=clip rollout_is_threshold=0.4_2.0",
    ),
    ("use_opsm=false opsm_delta=0.1 mask_offpolicy_in_partial_rollout=false", ""),
    ("use_rs=true", f"rollout_rs=token_k1 {BAND}"),
    *(
        (f"use_rs=true rs_level={level} {UPPER}", f"rollout_rs={name} rollout_rs_threshold=3.0")
        for level, name in OLDER_NAMES.items()
    ),
    (
        f"use_rs=true rs_lower_bound=0.4 {UPPER}",
        "rollout_rs=token_k1 rollout_rs_threshold=3.0 rollout_rs_threshold_lower=0.4",
    ),
    ("rs_veto_threshold=1.0e-4", "rollout_token_veto_threshold=1.0e-4"),
    ("mis_veto_threshold=1.0e-4", "rollout_token_veto_threshold=1.0e-4"),
]


def settings_of(words: str) -> dict[str, Any]:
    pairs = (word.partition("=") for word in words.split())
    return {key: yaml.safe_load(text) for key, _, text in pairs}


@pytest.mark.parametrize(("there", "here"), TRANSLATED)
def test_a_setting_of_a_document_has_this_meaning(there: str, here: str | None) -> None:
    given = settings_of(there)
    config, notes = rollout_correction([given])
    expected = settings_of(there if here is None else here)
    assert vars(config) == vars(RolloutCorrectionConfig()) | expected
    older = given.get("rollout_rs") in OLDER_NAMES
    assert bool(notes) == (older or any(key not in OWN_KEYS for key in given))


def test_every_key_and_flag_is_among_those_settings() -> None:
    pairs = {pair for there, _ in TRANSLATED for pair in there.split()}
    used = {pair.partition("=")[0] for pair in pairs}
    elsewhere = {"custom_config_path", SECTION, "sde_window_size"}
    elsewhere |= {"DiffusionActorConfig.rollout_correction"}
    elsewhere |= {"actor_rollout_ref.rollout.calculate_log_probs"}
    flags = {flag.removeprefix("--").replace("-", "_") for flag in names("slime's flags")}
    assert {*names("Keys of a section"), *flags} - elsewhere <= used
    assert {name for name in names("Values") if "=" in name} <= pairs


@pytest.mark.parametrize("name", names("Presets"))
def test_a_preset_by_name_is_the_one_of_python(name: str) -> None:
    config = checked_config(compose_all([f"{SECTION}={name}"]).config).algorithm.rollout_correction
    assert config == getattr(RolloutCorrectionConfig, name)()
    assert rollout_correction([{"preset": name}])[0] == config


def test_no_preset_is_metrics_only() -> None:
    composed = compose_all([f"{SECTION}=null"]).config
    assert (
        checked_config(composed).algorithm.rollout_correction == RolloutCorrectionConfig.disabled()
    )


# --- Metrics and functions

TRAINING, ROLLOUT = log_probs()
MASK = torch.ones_like(TRAINING, dtype=torch.bool)
NORMALIZED = {
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
    "rollout_token_veto_threshold": 0.5,
}
CONFIGS = [
    NORMALIZED,
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_rs": list(CRITERIA), "rollout_rs_threshold": 2.0},
]


def decoupled(settings: dict[str, Any]) -> dict[str, float]:
    _, mask, metrics = flowgrpo_rc.compute_rollout_correction_and_rejection_mask(
        TRAINING, ROLLOUT, MASK, **settings
    )
    assert mask.shape == MASK.shape
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


MEASURED = {name: value for settings in CONFIGS for name, value in decoupled(settings).items()}


@pytest.mark.parametrize("name", names("Metrics"))
def test_a_metric_is_measured_in_decoupled_mode(name: str) -> None:
    for criterion in CRITERIA if "{" in name else [""]:
        assert math.isfinite(MEASURED[name.format(criterion=criterion)])

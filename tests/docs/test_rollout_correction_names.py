"""Every name of the four documents and of verl 0.9.1 is on docs/rollout_correction_names.md.

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
from support.builders import diffusion_batch, log_probs, loss_config, token_batch

import flowgrpo_rc
from flowgrpo_rc import DiffusionBatch, RolloutCorrectionConfig
from flowgrpo_rc.config.compose import compose_all, to_config
from flowgrpo_rc.config.translate_correction import KNOWN_KEYS, OWN_KEYS, rollout_correction
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.correction.config import LOSS_TYPES
from flowgrpo_rc.correction.metric_names import SLIME_FRACTIONS, SLIME_NAMES
from flowgrpo_rc.correction.presets import PRESETS
from flowgrpo_rc.correction.thresholds import CRITERIA, IS_MODES, OLDER_NAMES
from flowgrpo_rc.correction.weights import IS_LEVELS

PAGE = Path(__file__).parents[2] / "docs" / "rollout_correction_names.md"
SECTION = "algorithm.rollout_correction"

# --- The names of the documents

KEYS = {
    "math": """
        bypass_old_logprob_for_rollout use_pure_rollout_correction rollout_is
        rollout_is_threshold rollout_rs rollout_rs_threshold rollout_rs_threshold_lower
        rollout_token_veto_threshold rollout_is_batch_normalize
    """,
    "usage": """
        algorithm.rollout_correction rollout_is rollout_is_threshold rollout_rs
        rollout_rs_threshold rollout_rs_threshold_lower rollout_token_veto_threshold
        bypass_old_logprob_for_rollout use_pure_rollout_correction
        actor_rollout_ref.rollout.calculate_log_probs
    """,
    "diffusion": """
        algorithm.rollout_correction DiffusionActorConfig.rollout_correction bypass_mode
        rollout_is rollout_rs rollout_rs_threshold rollout_is_threshold loss_type
        sde_window_size
    """,
    "verl 0.9.1": """
        algorithm.rollout_correction rollout_is rollout_is_threshold rollout_is_batch_normalize
        rollout_rs rollout_rs_threshold bypass_mode loss_type
    """,
    "verl 0.6.1": "use_policy_gradient",
}
FLAGS = {
    "slime": """
        --use-tis --custom-config-path --use-rollout-logprobs --get-mismatch-metrics
        --use-rollout-correction --tis-mode --tis-lower-bound --tis-upper-bound --tis-level
        --tis-batch-normalize --use-rs --rs-lower-bound --rs-upper-bound --rs-level
        --rs-veto-threshold --custom-tis-function-path --mis-level --mis-mode --mis-upper-bound
        --mis-lower-bound --mis-veto-threshold --mis-batch-normalize
    """,
}
VALUES = {
    "math": """
        rollout_is=null rollout_is=token rollout_is=sequence rollout_rs=token
        rollout_rs=sequence rollout_rs=geometric
    """,
    "usage": """
        rollout_is=null rollout_is=token rollout_is=sequence rollout_rs=null rollout_rs=token
        rollout_rs=sequence rollout_rs=geometric
    """,
    "diffusion": """
        rollout_is=sequence rollout_rs=seq_mean_k1 rollout_rs=token_k1 loss_type=ppo_clip
        flow_grpo grpo_guard
    """,
    "slime": """
        tis_mode=truncate tis_mode=clip mis_mode=mask tis_level=token tis_level=sequence
        tis_level=geometric rs_level=token rs_level=sequence rs_level=geometric
    """,
    "verl 0.9.1": """
        rollout_is=null rollout_is=token rollout_is=sequence rollout_is_threshold=0.5_5.0
        rollout_rs=null loss_type=ppo_clip loss_type=reinforce rollout_rs=token_k1
        rollout_rs=token_k2 rollout_rs=token_k3 rollout_rs=seq_sum_k1 rollout_rs=seq_sum_k2
        rollout_rs=seq_sum_k3 rollout_rs=seq_mean_k1 rollout_rs=seq_mean_k2
        rollout_rs=seq_mean_k3 rollout_rs=seq_max_k2 rollout_rs=seq_max_k3
    """,
}
NAMED_PRESETS = {
    "math": """
        decoupled_token_is decoupled_seq_is decoupled_seq_is_rs decoupled_geo_rs ppo_is_bypass
        pg_rs pg_is disabled
    """,
    "usage": "token_is seq_is seq_is_rs seq_mis geo_rs ppo_is_bypass pure_is disabled",
    "verl 0.9.1": """
        decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs
        decoupled_geo_rs bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs
        bypass_pg_is bypass_pg_token_icepop bypass_pg_geo_rs decoupled_geo_rs_seq_tis
        decoupled_geo_rs_token_tis bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis
        decoupled_k3_rs decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis disabled
    """,
}
NAMED_FUNCTIONS = {
    "math": """
        RolloutCorrectionConfig compute_policy_loss_with_rollout_correction
        compute_rollout_rejection_mask compute_policy_loss compute_offpolicy_metrics
        actor.compute_log_prob
    """,
    "usage": """
        RolloutCorrectionConfig compute_rollout_correction_and_rejection_mask
        compute_offpolicy_metrics compute_policy_loss_with_rollout_correction
        check_rollout_correction_health plot_is_metrics actor.compute_log_prob
    """,
    "diffusion": """
        apply_bypass_mode_to_diffusion_batch diffusion_loss
        compute_rollout_correction_and_rejection_mask
        apply_rollout_correction_to_diffusion_batch
    """,
    "verl 0.9.1": """
        RolloutCorrectionConfig compute_rollout_correction_and_rejection_mask
        compute_rollout_correction_weights compute_rollout_rejection_mask
        compute_offpolicy_metrics compute_is_metrics compute_rs_metrics
        compute_rollout_correction_and_add_to_batch compute_rollout_corr_metrics_from_logprobs
        apply_bypass_mode compute_policy_loss_bypass_mode compute_policy_loss_reinforce
    """,
}
ARGUMENTS = {
    "usage": """
        old_log_prob rollout_log_prob response_mask modified_response_mask metrics
        rollout_is_weights
    """,
    "diffusion": "old_log_probs rollout_log_probs rollout_is_weights",
    "slime": "old_log_probs rollout_log_probs",
}
METRICS = {
    "math": "rollout_is_batch_norm_factor",
    "usage": """
        rollout_is_mean rollout_is_std rollout_is_min rollout_is_max rollout_is_eff_sample_size
        rollout_is_veto_fraction rollout_is_catastrophic_token_fraction
        rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean
        rollout_is_seq_std rollout_is_seq_min rollout_is_seq_max rollout_is_seq_max_deviation
        rollout_is_seq_fraction_high rollout_is_seq_fraction_low rollout_is_masked_fraction
        rollout_is_seq_masked_fraction training_ppl rollout_ppl ppl_ratio training_log_ppl
        rollout_log_ppl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max log_ppl_diff_min kl k3_kl
        chi2_token chi2_seq
    """,
    "diffusion": """
        rollout_is_mean rollout_is_max rollout_is_min rollout_is_eff_sample_size
        rollout_rs_masked_fraction rollout_rs_seq_masked_fraction kl k3_kl log_ppl_diff
        chi2_token chi2_seq rejected_ratio log_ppl_abs_diff
    """,
    "verl 0.9.1": """
        rollout_is_mean rollout_is_std rollout_is_min rollout_is_max rollout_is_eff_sample_size
        rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean
        rollout_is_seq_std rollout_is_seq_min rollout_is_seq_max rollout_is_seq_max_deviation
        rollout_is_seq_fraction_high rollout_is_seq_fraction_low rollout_is_oob_ratio
        rollout_is_batch_norm_factor rollout_rs_masked_fraction rollout_rs_seq_masked_fraction
        training_ppl rollout_ppl ppl_ratio training_log_ppl rollout_log_ppl log_ppl_diff
        log_ppl_abs_diff log_ppl_diff_max log_ppl_diff_min kl k3_kl chi2_token chi2_seq
        rollout_rs_{criterion}_mean rollout_rs_{criterion}_max rollout_rs_{criterion}_min
        rollout_rs_{criterion}_std rollout_rs_{criterion}_fraction_high
        rollout_rs_{criterion}_fraction_low rollout_rs_{criterion}_seq_mean
        rollout_rs_{criterion}_seq_std rollout_rs_{criterion}_seq_max
        rollout_rs_{criterion}_seq_min rollout_rs_{criterion}_seq_max_deviation
        rollout_rs_{criterion}_seq_fraction_high rollout_rs_{criterion}_seq_fraction_low
        rollout_rs_{criterion}_masked_fraction rollout_rs_{criterion}_seq_masked_fraction
    """,
}
SLIME_METRICS = {
    "slime": """
        mismatch_training_log_ppl mismatch_training_ppl mismatch_rollout_log_ppl
        mismatch_rollout_ppl mismatch_kl mismatch_k3_kl mismatch_log_ppl_diff
        mismatch_log_ppl_abs_diff mismatch_ppl_ratio train_rollout_logprob_abs_diff ois
        mis_mean_is_weight_before_clip mis_ratio_mean_after_mis mis_truncate_fraction
        mis_clip_fraction_low mis_clip_fraction_high mis_mask_fraction_low
        mis_mask_fraction_high mis_catastrophic_token_fraction mis_catastrophic_seq_fraction
        mis_batch_norm_factor
    """,
}
PINNED = {
    "Keys": KEYS,
    "slime's flags": FLAGS,
    "Values": VALUES,
    "Presets": NAMED_PRESETS,
    "Functions and classes": NAMED_FUNCTIONS,
    "Arguments and results": ARGUMENTS,
    "Metrics": METRICS,
    "slime's metrics": SLIME_METRICS,
}


def names(lists: dict[str, str]) -> list[str]:
    """Returns the names without repetition, in the order of the lists."""
    return list(dict.fromkeys(name for text in lists.values() for name in text.split()))


# --- The tables of the page


class Row(NamedTuple):
    """A row of the page.

    `here` holds our names; those of `there` if it says `same`, none if it says `none`.
    """

    section: str
    there: list[str]
    documents: list[str]
    here: list[str]


def rows() -> Iterator[Row]:
    section = ""
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        inside = line.startswith("|") and (inside or line == "|there|documents|here|remark|")
        if not inside or line.startswith(("|---", "|there|")):
            continue
        there, documents, here, _ = (cell.strip() for cell in line[1:-1].split("|"))
        quoted = re.findall(r"`([^`]+)`", here)
        assert quoted or here in ("same", "none"), line
        found = re.findall(r"`([^`]+)`", there)
        yield Row(section, found, documents.split(", "), found if here == "same" else quoted)


ROWS = list(rows())


@pytest.mark.parametrize("section", PINNED)
def test_the_page_has_every_name_of_every_document(section: str) -> None:
    listed = {
        (name, tag)
        for row in ROWS
        if row.section == section
        for name in row.there
        for tag in row.documents
    }
    pinned = {(name, tag) for tag, text in PINNED[section].items() for name in text.split()}
    assert listed == pinned


def test_the_page_has_every_name_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    flags = {flag.removeprefix("--").replace("-", "_") for flag in names(FLAGS)}
    for name in (*KNOWN_KEYS, *PRESETS):
        assert f"`{name}`" in page or name in flags, name
    renamed = {
        new for table in (SLIME_NAMES, *SLIME_FRACTIONS.values()) for new in table.values()
    } | {"ois"}
    assert renamed == set(names(SLIME_METRICS))


ALLOWED = {
    "rollout_is": IS_LEVELS,
    "rollout_is_mode": IS_MODES,
    "rollout_rs": CRITERIA,
    "loss_type": LOSS_TYPES,
}


def exists(section: str, name: str) -> bool:
    """Says whether a name in the column `here` of a section is one of ours."""
    if section in ("Keys", "slime's flags", "Values"):
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

TIS = {"use_tis": True}
RS = {"use_rs": True}
TOKEN = {"rollout_is": "token"}
# Settings as a document writes them, and what differs from the defaults here.
TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bypass_mode": True}, {"bypass_mode": True}),
    ({"bypass_old_logprob_for_rollout": True}, {"bypass_mode": True}),
    (
        {"bypass_mode": True, "loss_type": "reinforce"},
        {"bypass_mode": True, "loss_type": "reinforce"},
    ),
    ({"bypass_mode": True, "loss_type": "ppo_clip"}, {"bypass_mode": True}),
    (
        {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True},
        {"bypass_mode": True, "loss_type": "reinforce"},
    ),
    ({"bypass_old_logprob_for_rollout": False, "use_pure_rollout_correction": False}, {}),
    (
        {"bypass_mode": True, "use_policy_gradient": True},
        {"bypass_mode": True, "loss_type": "reinforce"},
    ),
    ({"rollout_is": None, "rollout_rs": None}, {}),
    ({"rollout_is": "token", "rollout_is_threshold": 3.0}, TOKEN | {"rollout_is_threshold": 3.0}),
    ({"rollout_is": "sequence"}, {"rollout_is": "sequence"}),
    (
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        TOKEN | {"rollout_is_batch_normalize": True},
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        TOKEN | {"rollout_is_threshold": "0.5_5.0"},
    ),
    *(
        (
            {"rollout_rs": level, "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.4},
            {"rollout_rs": level, "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.4},
        )
        for level in ("token", "sequence", "geometric")
    ),
    *(({"rollout_rs": name, "rollout_rs_threshold": 2.0},) * 2 for name in CRITERIA),
    ({"rollout_token_veto_threshold": 1e-4}, {"rollout_token_veto_threshold": 1e-4}),
    (TIS, TOKEN),
    ({"use_rollout_correction": True}, TOKEN),
    ({"use_tis": False}, {}),
    ({"use_rollout_logprobs": True}, {"bypass_mode": True}),
    ({"use_rollout_logprobs": False, "use_rollout_correction": False}, {}),
    ({"use_rollout_logprobs": True, "use_rollout_correction": True}, TOKEN | {"bypass_mode": True}),
    ({"get_mismatch_metrics": True}, {}),
    (
        {"custom_tis_function_path": "support.builders.drop_odd"},
        {"custom_correction": "support.builders:drop_odd"},
    ),
    *(
        (TIS | {f"{s}_level": level}, {"rollout_is": level})
        for s in ("tis", "mis")
        for level in ("token", "sequence")
    ),
    *((TIS | {f"{s}_level": "geometric"}, {"rollout_is": "geometric"}) for s in ("tis", "mis")),
    *(
        (TIS | {f"{s}_mode": "truncate"}, TOKEN | {"rollout_is_mode": "truncate"})
        for s in ("tis", "mis")
    ),
    *(
        (TIS | {f"{s}_upper_bound": 3.0}, TOKEN | {"rollout_is_threshold": 3.0})
        for s in ("tis", "mis")
    ),
    *(
        (
            TIS | {f"{s}_mode": mode, f"{s}_lower_bound": 0.4, f"{s}_upper_bound": 3.0},
            TOKEN | {"rollout_is_mode": mode, "rollout_is_threshold": "0.4_3.0"},
        )
        for s in ("tis", "mis")
        for mode in ("clip", "mask")
    ),
    *(
        (TIS | {f"{s}_batch_normalize": True}, TOKEN | {"rollout_is_batch_normalize": True})
        for s in ("tis", "mis")
    ),
    (RS, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}),
    *(
        (
            RS | {"rs_level": level, "rs_upper_bound": 3.0},
            {"rollout_rs": name, "rollout_rs_threshold": 3.0},
        )
        for level, name in OLDER_NAMES.items()
    ),
    (
        RS | {"rs_lower_bound": 0.4, "rs_upper_bound": 3.0},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 3.0, "rollout_rs_threshold_lower": 0.4},
    ),
    ({"rs_veto_threshold": 1e-4}, {"rollout_token_veto_threshold": 1e-4}),
    ({"mis_veto_threshold": 1e-4}, {"rollout_token_veto_threshold": 1e-4}),
]


def written(settings: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items())


@pytest.mark.parametrize(
    ("there", "here"), TRANSLATED, ids=[written(there) for there, _ in TRANSLATED]
)
def test_a_setting_of_a_document_has_this_meaning(
    there: dict[str, Any], here: dict[str, Any]
) -> None:
    config, notes = rollout_correction([there])
    assert vars(config) == vars(RolloutCorrectionConfig()) | here
    assert bool(notes) == (
        any(key not in OWN_KEYS for key in there) or there.get("rollout_rs") in OLDER_NAMES
    )


def test_every_key_and_flag_is_among_those_settings() -> None:
    used = {key for there, _ in TRANSLATED for key in there}
    elsewhere = {
        "custom_config_path",
        SECTION,
        "DiffusionActorConfig.rollout_correction",
        "sde_window_size",
    }
    elsewhere |= {"actor_rollout_ref.rollout.calculate_log_probs"}
    flags = {flag.removeprefix("--").replace("-", "_") for flag in names(FLAGS)}
    assert {*names(KEYS), *flags} - elsewhere <= used
    pairs = {
        f"{key}={'null' if value is None else value}"
        for there, _ in TRANSLATED
        for key, value in there.items()
    }
    assert {name for name in names(VALUES) if "=" in name} <= pairs


def test_keys_with_a_path() -> None:
    """Keys that are not in the section, and the loss that the diffusion document names."""
    composed, rows = compose_all(
        [
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor.rollout_correction.rollout_is=token",
            "actor.rollout_correction.bypass_mode=true",
            "rollout.algo.sde_window_size=2",
            "actor.diffusion_loss.loss_mode=flow_grpo",
        ]
    )
    config = to_config(composed)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.rollout.calculate_log_probs
    assert config.rollout.algo.sde_window_size == 2
    assert [row[1:3] for row in rows] == [
        ("actor_rollout_ref.rollout.calculate_log_probs=true", "rollout.calculate_log_probs=true")
    ]


@pytest.mark.parametrize("name", names(NAMED_PRESETS))
def test_a_preset_by_name_is_the_one_of_python(name: str) -> None:
    config = to_config(compose_all([f"{SECTION}={name}"]).config).algorithm.rollout_correction
    assert config == getattr(RolloutCorrectionConfig, name)()
    assert rollout_correction([{"preset": name}])[0] == config


def test_no_preset_is_metrics_only() -> None:
    composed = compose_all([f"{SECTION}=null"]).config
    assert to_config(composed).algorithm.rollout_correction == RolloutCorrectionConfig.disabled()


# --- Metrics and functions

TRAINING, ROLLOUT = log_probs()
MASK = torch.ones_like(TRAINING, dtype=torch.bool)
ADVANTAGES = torch.linspace(-1, 1, TRAINING.numel(), dtype=torch.float64).reshape(TRAINING.shape)
CONFIGS = [
    {
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
        "rollout_token_veto_threshold": 0.5,
    },
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_rs": list(CRITERIA), "rollout_rs_threshold": 2.0},
]


def decoupled(settings: dict[str, Any]) -> dict[str, float]:
    _, mask, metrics = flowgrpo_rc.compute_rollout_correction_and_rejection_mask(
        TRAINING, ROLLOUT, MASK, **settings
    )
    assert mask.shape == MASK.shape
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def by_the_loss(config: RolloutCorrectionConfig, *, text: bool) -> dict[str, float]:
    """Returns the metrics of the loss; in bypass mode they include the correction's."""
    fields = {"old_log_probs": ROLLOUT, "advantages": ADVANTAGES}
    batch = token_batch(ROLLOUT, MASK, **fields) if text else diffusion_batch(ROLLOUT, **fields)
    if not config.bypass_mode:
        batch, _ = flowgrpo_rc.apply_rollout_correction_to_batch(batch, config)
    loss = flowgrpo_rc.token_loss if text else flowgrpo_rc.diffusion_loss
    total, metrics = loss(loss_config(config), TRAINING, batch)
    assert math.isfinite(total)
    return metrics.compute()


MEASURED = {name: value for settings in CONFIGS for name, value in decoupled(settings).items()}


@pytest.mark.parametrize("name", names(METRICS))
def test_a_metric_is_measured_in_decoupled_mode(name: str) -> None:
    for criterion in CRITERIA if "{" in name else [""]:
        assert math.isfinite(MEASURED[name.format(criterion=criterion)])


@pytest.mark.parametrize("text", [False, True], ids=["images", "text"])
def test_the_metrics_are_measured_by_the_loss_in_bypass_mode(text: bool) -> None:
    found: dict[str, float] = {}
    for settings in CONFIGS:
        config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", **settings)
        found |= by_the_loss(config, text=text)
    missing = {f"rollout_corr/{name}" for name in MEASURED} - set(found)
    assert missing == set()
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("name", names(SLIME_METRICS))
@pytest.mark.parametrize("both", [False, True], ids=["slime", "both"])
def test_a_metric_of_slime_is_measured(name: str, both: bool) -> None:
    """With `both` it stands beside verl's name, with `slime` in its place."""
    mode = next((mode for mode, table in SLIME_FRACTIONS.items() if name in table.values()), None)
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_mode=mode,
        rollout_is_batch_normalize=True,
        rollout_token_veto_threshold=0.5,
        metric_names="both" if both else "slime",
    )
    _, bag = flowgrpo_rc.apply_rollout_correction_to_diffusion_batch(
        diffusion_batch(ROLLOUT, old_log_probs=TRAINING), config
    )
    found = bag.compute() | by_the_loss(config, text=False)
    (row,) = [row for row in ROWS if row.section == "slime's metrics" and name in row.there]
    ours = row.here[row.there.index(name)]
    assert math.isfinite(found[name])
    assert (ours in found) == both
    assert not both or found[ours] == found[name]


def test_slime_s_ratio_of_the_update_is_one_of_decoupled_mode() -> None:
    assert "ois" not in by_the_loss(
        RolloutCorrectionConfig(bypass_mode=True, metric_names="slime"), text=True
    )


def test_every_function_of_the_documents_runs(tmp_path: Path) -> None:
    """Functions that the column `here` names.

    The batch functions and losses ran above, under both their names.
    """
    config = RolloutCorrectionConfig.token_is()
    metrics = {f"rollout_corr/{name}": value for name, value in MEASURED.items()}
    batch = diffusion_batch(ROLLOUT)
    for apply in (flowgrpo_rc.apply_bypass_mode, flowgrpo_rc.apply_bypass_mode_to_diffusion_batch):
        assert apply(batch).old_log_probs is ROLLOUT
    log_ratio = TRAINING - ROLLOUT
    weights = flowgrpo_rc.compute_rollout_correction_weights(log_ratio, MASK, rollout_is="token")
    entry = flowgrpo_rc.compute_rollout_correction_and_rejection_mask(
        TRAINING, ROLLOUT, MASK, rollout_is="token"
    )
    assert weights.equal(entry.weights)
    kept = flowgrpo_rc.compute_rollout_rejection_mask(
        log_ratio, MASK, rollout_rs="token", rollout_rs_threshold=2.0
    )
    assert kept.equal(log_ratio.abs() <= math.log(2))
    assert flowgrpo_rc.compute_offpolicy_metrics(TRAINING, ROLLOUT, MASK)["kl"] == pytest.approx(
        MEASURED["kl"]
    )
    assert not flowgrpo_rc.check_rollout_correction_health({"rollout_corr/kl": 0.2}, config)
    assert flowgrpo_rc.check_rollout_correction_health({"rollout_corr/kl": 0.05}, config)
    assert (
        flowgrpo_rc.plot_rollout_correction([metrics], tmp_path / "metrics.png").stat().st_size > 0
    )
    used = (
        "apply_rollout_correction_to_batch apply_rollout_correction_to_diffusion_batch token_loss "
        "diffusion_loss"
    )
    used += " apply_bypass_mode apply_bypass_mode_to_diffusion_batch RolloutCorrectionConfig"
    used += " compute_rollout_correction_weights compute_rollout_correction_and_rejection_mask"
    used += (
        " compute_rollout_rejection_mask compute_offpolicy_metrics check_rollout_correction_health"
    )
    used += " plot_rollout_correction"
    named = {name for row in ROWS if row.section == "Functions and classes" for name in row.here}
    assert named == set(used.split())

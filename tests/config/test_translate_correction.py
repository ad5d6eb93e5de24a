"""The rollout correction in the words of the documents: contradictions, layers, translations."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compositions import checked_config

from flowgrpo_rc import RolloutCorrectionConfig
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_all, compose_config
from flowgrpo_rc.config.translate_correction import rollout_correction

SECTION = "algorithm.rollout_correction"
OTHER = "actor.rollout_correction"
QWEN = "+experiment=qwen_image_ocr_rollout_corr_4xh800"


def composed(*overrides: str, config_name: str = "tiny_ocr") -> RolloutCorrectionConfig:
    config = compose_all(overrides, config_name=config_name).config
    return checked_config(config).algorithm.rollout_correction


def test_the_command_line_overrides_the_file_and_keeps_the_rest_of_it() -> None:
    """configs/tiny_ocr.yaml has bypass mode and a band."""
    file = composed()
    assert (file.bypass_mode, file.rollout_is, file.rollout_rs) == (True, None, "token_k1")
    changed = composed(f"{SECTION}.use_rollout_logprobs=false", f"{OTHER}.rollout_is=token")
    assert vars(changed) == vars(file) | {"bypass_mode": False, "rollout_is": "token"}


@pytest.mark.parametrize("key", [SECTION, f"{OTHER}.preset", f"actor_rollout_ref.{OTHER}"])
def test_a_preset_on_the_command_line_replaces_the_section_of_the_file(key: str) -> None:
    assert composed(f"{key}=geo_rs") == RolloutCorrectionConfig.geo_rs()


def test_keys_beside_a_preset_refine_it() -> None:
    refined = (f"{SECTION}.rollout_token_veto_threshold=null", f"{OTHER}.rollout_is=token")
    expect = vars(RolloutCorrectionConfig.geo_rs(veto_threshold=None)) | {"rollout_is": "token"}
    assert vars(composed(f"{SECTION}=geo_rs", *refined)) == expect


def test_a_file_with_a_preset() -> None:
    file = {"preset": "seq_is_rs", "rollout_is_threshold": 3.0}
    assert rollout_correction([file, {}])[0] == RolloutCorrectionConfig.seq_is_rs(is_threshold=3.0)
    further = {"rollout_is_threshold": 4.0, "rollout_is_batch_normalize": True}
    changed, _ = rollout_correction([file, further])
    assert vars(changed) == vars(RolloutCorrectionConfig.seq_is_rs()) | further
    assert rollout_correction([file, {"preset": "pg_is"}])[0] == RolloutCorrectionConfig.pg_is()


def test_a_later_layer_overrides_what_would_be_a_contradiction_in_one_layer() -> None:
    """The result is validated as a whole."""
    mode, _ = rollout_correction([{"use_rollout_logprobs": True}, {"bypass_mode": False}])
    assert not mode.bypass_mode
    off, _ = rollout_correction([{"use_tis": True}, {"use_rollout_correction": False}])
    assert off.rollout_is is None
    with pytest.raises(ValueError, match="loss_type=reinforce") as error:
        rollout_correction([{"preset": "pg_is"}, {"bypass_mode": False}])
    assert "bypass_mode" in str(error.value)


@pytest.mark.parametrize(
    ("layers", "bypass"),
    [
        ([{"bypass_mode": True}, {"rollout_is": "token"}], False),
        ([{"bypass_mode": True}, {"use_tis": True}], False),
        ([{"bypass_mode": True}, {"use_rollout_correction": "true"}], False),
        # slime recomputes, unless it is told not to.
        ([{"bypass_mode": True}, {"use_rs": True}], False),
        ([{"bypass_mode": True, "rollout_is": "token"}, {"use_tis": True}], False),
        ([{"bypass_mode": True}, {"use_tis": True, "use_rollout_logprobs": True}], True),
        ([{"use_rollout_logprobs": True}, {"use_tis": True}], True),
        # Rejection works in both modes, and metrics are metrics.
        ([{"bypass_mode": True}, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}], True),
        ([{"bypass_mode": True}, {"get_mismatch_metrics": True}], True),
        ([{"bypass_mode": True}, {"rollout_is": None}], True),
        # Whoever says the mode means it, and so does a file with weights as metrics.
        ([{"bypass_mode": True, "rollout_is": "token"}], True),
        ([{"bypass_mode": True}, {"rollout_is": "token", "bypass_mode": True}], True),
        ([{"bypass_mode": True, "rollout_is": "token"}, {"rollout_is": "sequence"}], True),
        # REINFORCE is weighed in bypass mode.
        ([{"preset": "pg_is"}, {"rollout_is": "token"}], True),
        ([{"bypass_mode": True}, {"rollout_is": "token", "loss_type": "reinforce"}], True),
        ([{"bypass_mode": True, "loss_type": "reinforce"}, {"rollout_is": "token"}], True),
    ],
)
def test_a_block_that_asks_for_weights_decides_the_mode(layers: list[dict], bypass: bool) -> None:
    """The documents' blocks leave out their default, decoupled mode."""
    config, notes = rollout_correction(layers)
    assert config.bypass_mode == bypass
    assert any("weights would be metrics alone" in note for note in notes) != bypass


@pytest.mark.parametrize(
    "block",
    [
        "rollout_is: null\nrollout_rs: token\nrollout_rs_threshold: 2.0",
        "rollout_is: null\nrollout_rs: null",
        "rollout_token_veto_threshold: 1.0e-4",
    ],
    ids=["rejection", "metrics", "veto"],
)
def test_a_block_that_leaves_the_mode_says_which_one_it_has(block: str, tmp_path: Path) -> None:
    """On the bundled image job that is bypass mode; the documents mean decoupled mode."""
    start = "defaults: [tiny_ocr, _self_]\nalgorithm:\n  rollout_correction:\n"
    (tmp_path / "own.yaml").write_text(start + textwrap.indent(block, " " * 4))
    found = compose_all([], config_name="own", config_dir=str(tmp_path))
    assert found.config.algorithm.rollout_correction.bypass_mode
    assert [row.here for row in found.rows if "the documents mean" in row.here]
    decoupled = block + "\nbypass_mode: false"
    (tmp_path / "own.yaml").write_text(start + textwrap.indent(decoupled, " " * 4))
    found = compose_all([], config_name="own", config_dir=str(tmp_path))
    rows = found.rows + compose_all(["+correction=centered", QWEN], config_name=None).rows
    assert not [row for row in rows if "the documents mean" in row.here]


def test_the_mode_that_a_block_decides_is_told(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "--dry-run", f"{SECTION}.use_tis=true"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "use_tis=true bypass_mode=False; in bypass mode with ppo_clip weights" in told


def test_a_slime_configuration_file_and_keys_are_one_layer(tmp_path: Path) -> None:
    path = tmp_path / "mis.yaml"
    path.write_text("use_tis: true\nmis_mode: mask\nmis_lower_bound: 0.4\nmis_upper_bound: 3.0\n")
    file = f"{SECTION}.custom_config_path={path}"
    found = composed(f"{SECTION}=disabled", file, f"{SECTION}.mis_level=sequence")
    assert (found.rollout_is, found.rollout_is_mode) == ("sequence", "mask")
    assert found.rollout_is_threshold == "0.4_3.0"
    with pytest.raises(ValueError, match="contradict") as error:
        composed(file, f"{SECTION}.mis_upper_bound=2.0")
    assert f"{SECTION}.mis_upper_bound=2.0" in str(error.value)
    assert file in str(error.value)


@pytest.mark.parametrize("text", ["[use_tis]", "use_tis: [", "use_tiss: true"])
def test_a_wrong_slime_configuration_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mis.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"custom_config_path|use_tiss"):
        rollout_correction([{"custom_config_path": str(path)}])


def test_a_translation_is_told() -> None:
    flags = {"use_tis": True, "tis_upper_bound": 3.0, "rs_level": "token"}
    assert rollout_correction([flags])[1] == [
        "rs_level=token is not used: use_rs is not on",
        "tis_upper_bound -> rollout_is_threshold=3.0",
        "use_tis -> rollout_is=token",
    ]
    (preset,) = rollout_correction([{"preset": "geo_rs"}])[1]
    assert preset.startswith("preset=geo_rs -> centered=False, rollout_rs=seq_mean_k1, ")


OFF = {"use_tis": False}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([{"use_tis": True}, {"tis_level": "sequence"}], {"rollout_is": "sequence"}),
        (
            [{"use_tis": True, "tis_mode": "mask"}, {"mis_upper_bound": 4.0}],
            {"rollout_is_threshold": "0.25_4.0", "rollout_is_mode": "mask"},
        ),
        ([{"use_rs": True}, {"rs_upper_bound": 3.0}], {"rollout_rs_threshold": 3.0}),
        ([{"use_rs": True}, {"use_rs": False}], {"rollout_rs": None, "rollout_rs_threshold": None}),
        (
            [{"use_tis": True, "tis_batch_normalize": True, "tis_mode": "clip"}, OFF],
            {"rollout_is": None, "rollout_is_batch_normalize": False, "rollout_is_mode": None},
        ),
        (
            [{"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, {"rollout_rs": None}],
            {"rollout_rs_threshold": None},
        ),
        (
            [{"rollout_is": "token", "rollout_is_mode": "clip"}, {"rollout_is": None}],
            {"rollout_is_mode": None},
        ),
        ([{"use_tis": "false"}], {"rollout_is": None}),
        (
            [{"bypass_mode": True, "use_pure_rollout_correction": "false"}],
            {"loss_type": "ppo_clip"},
        ),
        (
            [{"use_tis": True, "tis_mode": "clip", "tis_upper_bound": "3"}],
            {"rollout_is_threshold": f"{1 / 3}_3.0"},
        ),
        ([{"use_rs": True, "tis_upper_bound": 3.0}], {"rollout_rs_threshold": 3.0}),
    ],
)
def test_flags_refine_switch_off_and_accept_words(layers: list[dict], expected: dict) -> None:
    config, notes = rollout_correction(layers)
    assert {name: getattr(config, name) for name in expected} == expected
    if layers == [{"use_rs": True, "tis_upper_bound": 3.0}]:
        assert not any("not used" in note for note in notes)


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        ({"use_tis": "yes"}, "use_tis"),
        ({"use_tis": True, "tis_upper_bound": "wide"}, "tis_upper_bound"),
        ({"rs_veto_threshold": "abc"}, "rs_veto_threshold"),
        ({"rollout_token_veto_threshold": "abc"}, "rollout_token_veto_threshold"),
        ({"custom_correction": 3}, "custom_correction"),
        ({"bypass_mode": None}, "bypass_mode"),
        ({"preset": 3}, "preset"),
        ({"use_rs": False, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "use_rs"),
    ],
)
def test_values_of_the_wrong_type_name_their_key(layer: dict, key: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.rollout_correction\.{key}"):
        rollout_correction([layer])


@pytest.mark.parametrize(
    ("parent", "section", "expected"),
    [
        (
            "token_grpo",
            "{preset: decoupled_seq_is_rs, rollout_is_threshold: 5.0}",
            ("sequence", False, 5.0),
        ),
        ("token_grpo", "pg_is", ("sequence", True, 2.0)),
        ("token_grpo", "{use_tis: true, tis_level: geometric}", ("geometric", False, 2.0)),
        ("tiny_ocr", "{preset: decoupled_seq_is}", ("sequence", False, 2.0)),
        ("tiny_ocr", "{rollout_is: token}", ("token", False, 2.0)),
        ("tiny_ocr", "{rollout_is: token, bypass_mode: true}", ("token", True, 2.0)),
    ],
)
def test_a_file_overrides_the_one_that_it_builds_on(
    tmp_path: Path, parent: str, section: str, expected: tuple
) -> None:
    text = f"defaults: [{parent}, _self_]\nalgorithm:\n  rollout_correction: {section}\n"
    (tmp_path / "mine.yaml").write_text(text)
    config = checked_config(compose_config([], config_name="mine", config_dir=str(tmp_path)))
    found = config.algorithm.rollout_correction
    assert (found.rollout_is, found.bypass_mode, found.rollout_is_threshold) == expected


def test_a_part_of_a_preset_can_be_switched_off() -> None:
    rest = composed(f"{SECTION}=geo_rs", f"{SECTION}.rollout_rs=null")
    assert rest.rollout_token_veto_threshold == 1e-4
    assert composed(f"{SECTION}=slime_mis", f"{SECTION}.rollout_is=null").rollout_is_mode is None


def test_an_unquoted_pair_that_reads_as_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="1_5"):
        compose_config([f"{SECTION}.rollout_is_threshold=1_5"])


# The settings of one layer; the message names the last two keys.
CONTRADICTIONS = [
    "bypass_mode=false use_rollout_logprobs=true",
    "bypass_mode=false bypass_old_logprob_for_rollout=true",
    "bypass_old_logprob_for_rollout=false use_rollout_logprobs=true",
    "bypass_mode=true loss_type=ppo_clip use_pure_rollout_correction=true",
    "bypass_mode=true use_policy_gradient=true use_pure_rollout_correction=false",
    "use_tis=true use_rollout_correction=false",
    "use_tis=false rollout_is=token",
    "use_tis=true tis_level=token rollout_is=sequence",
    "use_tis=true tis_level=token mis_level=sequence",
    "use_tis=true tis_mode=truncate mis_mode=mask",
    "use_tis=true tis_lower_bound=0.4 mis_lower_bound=0.5",
    "use_tis=true tis_upper_bound=2.0 mis_upper_bound=3.0",
    "use_tis=true tis_clip=2.0 rollout_is_threshold=3.0",
    "use_tis=true tis_batch_normalize=true mis_batch_normalize=false",
    "use_tis=true tis_upper_bound=3.0 rollout_is_threshold=2.0",
    "rs_veto_threshold=0.1 mis_veto_threshold=0.2",
    "rs_veto_threshold=0.1 rollout_token_veto_threshold=0.2",
    "rollout_rs_threshold=2.0 use_rs=true rollout_rs=token_k2",
    "use_rs=true rollout_rs=token_k1 rs_upper_bound=3.0 rollout_rs_threshold=2.0",
    "custom_tis_function_path=support.builders.drop_odd custom_correction=support.builders:none",
    "preset=pg_is bypass_mode=false",
    "preset=token_is bypass_mode=true",
]


def layer_of(settings: str) -> dict[str, Any]:
    pairs = (word.split("=") for word in settings.split())
    return {key: yaml.safe_load(text) for key, text in pairs}


@pytest.mark.parametrize("settings", CONTRADICTIONS)
def test_a_contradiction_names_both_keys(settings: str) -> None:
    layer = layer_of(settings)
    with pytest.raises(ValueError, match=SECTION) as error:
        rollout_correction([layer])
    for key in list(layer)[-2:]:
        assert f"{SECTION}.{key}" in str(error.value)


def test_a_translated_key_may_not_contradict_a_preset() -> None:
    with pytest.raises(ValueError, match="preset=pg_is has bypass_mode="):
        rollout_correction([layer_of("preset=pg_is use_rollout_logprobs=false")])
    with pytest.raises(ValueError, match="preset=ppo_is_bypass has loss_type="):
        rollout_correction([layer_of("preset=ppo_is_bypass use_pure_rollout_correction=true")])


@pytest.mark.parametrize(
    "settings",
    [
        "bypass_mode=true bypass_old_logprob_for_rollout=true use_rollout_logprobs=true",
        "use_tis=true use_rollout_correction=true rollout_is=token",
        "use_tis=true tis_level=sequence mis_level=sequence",
        "preset=pg_is bypass_mode=true loss_type=reinforce rollout_is_threshold=3.0",
    ],
)
def test_saying_the_same_twice_is_no_contradiction(settings: str) -> None:
    rollout_correction([layer_of(settings)])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            f"{SECTION}.bypass_mode=true {OTHER}.bypass_mode=false",
            [f"{SECTION}.bypass_mode=True", f"{OTHER}.bypass_mode=False"],
        ),
        (f"{SECTION}=pg_is {OTHER}=geo_rs", ["'pg_is'", "'geo_rs'", SECTION, OTHER]),
        (f"{SECTION}=pg_is {OTHER}.bypass_mode=false", ["preset=pg_is", "bypass_mode=False"]),
        (f"{SECTION}.use_tiss=true", ["use_tiss", "did you mean 'use_tis'?"]),
        (f"{SECTION}=pgis", ["'pgis'", "did you mean 'pg_is'?", "decoupled_geo_rs"]),
        (f"{SECTION}.preset=token_si", ["'token_si'", "did you mean 'token_is'?"]),
        (f"{SECTION}.custom_config_path=/no/file.yaml", ["custom_config_path=/no/file.yaml"]),
        (f"{SECTION}.use_opsm=true", ["use_opsm=True", "a negative one alone"]),
        (f"{SECTION}.mask_offpolicy_in_partial_rollout=true", ["never partial here; drop it"]),
    ],
)
def test_the_command_line_says_what_is_wrong(
    overrides: str, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", "--cfg", "job", *overrides.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    for word in words:
        assert word in printed.err

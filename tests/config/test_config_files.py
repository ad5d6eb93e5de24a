"""Files of the user: other systems' keys in them, blocks alone, and messages that name the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.compositions import checked_config

from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import Composition, compose_all, compose_config, to_config
from flowgrpo_rc.correction.config import RolloutCorrectionConfig

SECTION = "algorithm:\n  rollout_correction:\n"
REQUIRED = "actor_rollout_ref:\n  rollout:\n    calculate_log_probs: true\n"


def composed(folder: Path, text: str, *overrides: str, name: str = "mine") -> Composition:
    (folder / f"{name}.yaml").write_text(text)
    return compose_all(overrides, config_name=name, config_dir=str(folder))


BLOCKS: list[tuple[str, dict[str, object]]] = [
    (
        "rollout_is: token, rollout_rs: null, bypass_old_logprob_for_rollout: false",
        {"bypass_mode": False, "rollout_is": "token", "rollout_rs": None},
    ),
    (
        "rollout_rs: token, rollout_rs_threshold: 2.0, rollout_token_veto_threshold: 1e-4",
        {"bypass_mode": False, "rollout_rs": "token", "rollout_token_veto_threshold": 1e-4},
    ),
    (
        "bypass_old_logprob_for_rollout: true, use_pure_rollout_correction: true",
        {"bypass_mode": True, "loss_type": "reinforce"},
    ),
    # What a block leaves out is the documents' default, not the bundled job's.
    (
        "rollout_rs: geometric, rollout_rs_threshold: 1.001",
        {"bypass_mode": False, "rollout_is": None, "rollout_rs": "geometric"},
    ),
    (
        "rollout_token_veto_threshold: 1e-3",
        {"bypass_mode": False, "rollout_rs": None, "rollout_token_veto_threshold": 1e-3},
    ),
    (
        "rollout_is: token, bypass_mode: true",
        {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": "token"},
    ),
]
PLACES = (
    f"algorithm: {{rollout_correction: {{BLOCK}}}}\n{REQUIRED}",
    f"{REQUIRED}  actor: {{rollout_correction: {{BLOCK}}}}\n",
)


@pytest.mark.parametrize(
    ("text", "block", "expected"),
    [(text, *block) for text, block in zip(PLACES * len(BLOCKS), BLOCKS, strict=False)],
)
def test_a_block_alone_builds_on_the_bundled_job(
    tmp_path: Path, text: str, block: str, expected: dict
) -> None:
    found = composed(tmp_path, text.replace("BLOCK", block))
    found.check()
    config = checked_config(found.config)
    correction = config.algorithm.rollout_correction
    assert {name: getattr(correction, name) for name in expected} == expected
    assert config.rollout.pipeline.width == 64
    told = [(row.given, row.here) for row in found.rows]
    assert ("(what is not given)", "configs/tiny_ocr.yaml") in told
    assert ("actor_rollout_ref.rollout.calculate_log_probs=true", "as here") in told


def test_a_file_says_what_an_override_says(tmp_path: Path) -> None:
    """Names, units, defaults of verl-omni and keys that stop the run."""
    text = """
        data: {seed: 7, shuffle: false, train_files: [a.txt]}
        actor_rollout_ref:
          model:
            path: a/b
            algorithm: flow_dppo
            lora_rank: 8
            target_modules: [to_q, to_k]
            extra_tokenizers: {clip: {path: tokenizer, max_length: 77}}
          actor: {grad_clip: 0.5, fsdp_config: {model_dtype: bfloat16}}
          rollout: {name: vllm_omni, n: 4, algo: {sde_type: cps}}
        reward:
          reward_model: {enable: true, model_path: c/d}
          custom_reward_function: {path: x/genrm_ocr.py}
        trainer: {logger: console, total_training_steps: 5, val_before_train: false, nnodes: 2}
    """
    found = composed(tmp_path, text, "actor.optim.lr=1e-5")
    config = found.config
    assert config.trainer.seed == 7
    assert config.data.train_files == ["a.txt"]
    assert (config.model.path, config.model.lora_rank, config.model.dtype) == ("a/b", 8, "bf16")
    assert config.model.target_modules == ["to_q", "to_k"]
    assert (config.actor.optim.clip_grad, config.actor.optim.lr) == (0.5, 1e-5)
    assert config.actor.diffusion_loss.loss_mode == "flow_dppo"
    assert config.rollout.algo.log_prob_convention == "peers"
    assert config.rollout.pipeline.width == 512  # that of configs/verl_omni.yaml
    assert (config.trainer.logger, config.trainer.val_before_train) == (["console"], False)
    assert set(config.reward.terms.vlm_ocr) == {"url", "model"}
    stopped = [row.key for row in found.rows if row.kind == "stops the run"]
    assert stopped == ["data.shuffle"]
    with pytest.raises(ValueError, match=r"compat\.ignore=\[data\.shuffle\]"):
        found.check()
    composed(tmp_path, text, "compat.ignore=[data.shuffle]").check()


def test_the_command_line_overrides_a_translated_file(tmp_path: Path) -> None:
    text = f"{REQUIRED}    n: 4\n  model: {{algorithm: flow_dppo}}\n"
    config = composed(tmp_path, text, "rollout.n=6").config
    assert config.rollout.n == 6
    other = composed(tmp_path, text, "actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-5")
    assert other.config.actor.diffusion_loss.clip_ratio == 1e-4  # flow_dppo has none
    reward = "reward: {custom_reward_function: {path: genrm_ocr.py}}\n"
    chosen = composed(tmp_path, reward, "reward.terms.jpeg.weight=1", "reward.terms.ocr=null")
    assert "vlm_ocr" not in chosen.config.reward.terms


def test_this_project_s_own_word_replaces_a_translated_one(tmp_path: Path) -> None:
    found = composed(tmp_path, "data: {seed: 42}\ntrainer: {seed: 7}\n")
    assert found.config.trainer.seed == 7
    assert found.rows[0].here == "replaced by trainer.seed=7"


def test_a_file_in_other_words_may_be_built_on(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "base.yaml").write_text(
        f"defaults: [tiny_ocr, _self_]\n{SECTION}    use_tis: true\n{REQUIRED}    n: 4\n"
    )
    child = "defaults: [base, _self_]\nalgorithm: {rollout_correction: {tis_level: sequence}}\n"
    config = composed(tmp_path, child).config
    assert (config.rollout.n, config.rollout.pipeline.width) == (4, 64)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.bypass_mode) == ("sequence", False)
    whole = "# @package _global_\ndefaults: [/base, _self_]\ntrainer: {logger: console}\n"
    (tmp_path / "experiment" / "all.yaml").write_text(whole)
    chosen = compose_all(["+experiment=all"], config_dir=str(tmp_path)).config
    assert (chosen.rollout.n, chosen.trainer.logger) == (4, ["console"])


def test_overrides_come_on_top_of_a_block(tmp_path: Path) -> None:
    block = f"{SECTION}    rollout_rs: token\n    rollout_rs_threshold: 2.0\n"
    key = "algorithm.rollout_correction"
    found = composed(tmp_path, block, f"{key}.rollout_rs_threshold=3.0", f"{key}.use_tis=true")
    correction = checked_config(found.config).algorithm.rollout_correction
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("token", 3.0)
    assert (correction.rollout_is, correction.bypass_mode) == ("token", False)


def test_a_preset_alone_is_a_block(tmp_path: Path) -> None:
    found = composed(tmp_path, "algorithm: {rollout_correction: geo_rs}\n").config
    assert checked_config(found).algorithm.rollout_correction == RolloutCorrectionConfig.geo_rs()


def test_a_file_in_own_words_is_left_alone(tmp_path: Path) -> None:
    text = "defaults: [tiny_ocr, _self_]\nrollout: {n: 3}\nreward: {terms: {ocr: {weight: 2}}}\n"
    found = composed(tmp_path, text)
    assert not found.rows
    assert (found.config.rollout.n, found.config.reward.terms.ocr.weight) == (3, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("typo: 1", ["mine.yaml", "unknown key typo"]),
        ("rollout: {nn: 3}", ["mine.yaml", "rollout.nn", "did you mean rollout.n?"]),
        (
            "actor_rollout_ref: {actor: {optim: {lrr: 1}}}",
            ["unknown key actor.optim.lrr", "did you mean actor.optim.lr?"],
        ),
        ("rollout: {redraw: 2}", ["mine.yaml", "rollout.redraw=2: give true or false"]),
        ("rollout: {compile: 2}", ["rollout.compile=2", "give true or false"]),
        ("rollout: 3", ["rollout=3", "a section of keys"]),
        ("rollout: {n: many}", ["rollout.n", "mine", "'many'"]),
        ("data: {seed: 1}\nrollout: {n: many}", ["rollout.n: In 'mine'", "'many'"]),
        ("trainer: {seed: 2}\ndata: {seed: 1}", ["trainer.seed=2", "data.seed=1", "contradict"]),
        ("rollout: {n: [", ["mine.yaml", "cannot be read"]),
        ("algorithm: {rollout_correction: {rollout_iss: token}}", ["did you mean 'rollout_is'?"]),
    ],
)
def test_a_message_names_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        to_config(composed(tmp_path, text).config)
    for word in words:
        assert word in str(error.value)


def test_a_command_names_them_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny_ocr, _self_]\nrollout: {nn: 3}\n")
    command = ["train", "--dry-run", "--config-dir", str(tmp_path), "--config-name", "mine"]
    assert main(command) == 2
    assert re.search(r"error: \S+mine.yaml: .*did you mean rollout.n\?", capsys.readouterr().err)


def test_a_folder_a_name_and_a_content_that_are_none(tmp_path: Path) -> None:
    words = rf"--config-name other: there is no .other.; all are in .* and {tmp_path}$"
    with pytest.raises(ValueError, match=words):
        compose_config([], config_name="other", config_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"mine\.yaml must hold a mapping"):
        composed(tmp_path, "[rollout]")
    with pytest.raises(ValueError, match="--config-dir"):
        compose_config([], config_name="other", config_dir=str(tmp_path / "none"))

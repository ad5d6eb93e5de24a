"""Every key of a verl-omni command is translated, reported or refused; none is silently ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from support.verl_omni_commands import FOLDER, NFT, QWEN_IMAGE, SD35

from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import (
    Composition,
    compose_all,
    compose_config,
    to_config,
)
from flowgrpo_rc.config.rows import check, resolved
from flowgrpo_rc.config.translate import Setting, TranslatedOverrides, translate, values_of
from flowgrpo_rc.config.tree import known_keys

OTHER = "actor_rollout_ref."
VLLM = "http://127.0.0.1:8000/v1"
WHOLE = [f"{OTHER}model.path=a/b", f"{OTHER}rollout.name=vllm_omni"]


def of_kind(composed: Composition, kind: str) -> list[str]:
    return [row.key.removeprefix(OTHER) for row in composed.rows if row.kind == kind]


def rewritten(given: str) -> TranslatedOverrides:
    """Translates an override that stands alone."""
    key, _, text = given.lstrip("+").partition("=")
    return translate([Setting(given, key, yaml.safe_load(text), text)])


# --- Whole command lines

# `test_experiments.py` compares the command with a shipped experiment, too.
FROM_QWEN_IMAGE = {
    "reward.terms.ocr": None,
    "reward.terms.vlm_ocr.url": VLLM,
    "reward.terms.vlm_ocr.model": "Qwen/Qwen3-VL-8B-Instruct",
    "model.dtype": "bf16",
    "rollout.algo.sde_window_range": [0, 5],
    "rollout.val_kwargs.num_inference_steps": 50,
    "algorithm.rollout_correction.bypass_mode": True,
    "trainer.output_dir": "checkpoints/flow_grpo/qwen_image_ocr_lora_rollout_corr",
    # The command does not give these.
    "rollout.pipeline.height": 512,
    "trainer.mixed_precision": "bf16",
}
FROM_SD35 = {
    "reward.terms.vlm_ocr.url": VLLM,
    "reward.terms.vlm_ocr.model": "Qwen/Qwen2.5-VL-3B-Instruct",
    "trainer.val_before_train": False,
    "rollout.algo.sde_type": "cps",
    "rollout.algo.log_prob_convention": "peers",
    "actor.diffusion_loss.clip_ratio": 1e-5,
    "rollout.val_kwargs.n": 32,
    "trainer.seed": 42,
    "rollout.engine_kwargs": {},
    "rollout.val_kwargs.guidance_scale": 1.0,  # follows the rollout's
}
# `test_diffusion_nft.py` compares its loss, too. There are two updates a step.
FROM_NFT = {
    "rollout.name": "diffusers",
    "rollout.algo.sde_window_size": 0,
    "actor.use_kl_loss": True,
    "actor.kl_loss_coef": 1e-4,
    "actor.diffusion_loss.clip_ratio": 1e-4,
    "actor.diffusion_loss.options.beta": 0.1,
    "actor.diffusion_loss.options.old_decay_start": 150,
    "actor.diffusion_loss.options.old_decay_rate": 0.00375,
    "actor.diffusion_loss.options.old_interval": 4,
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [(QWEN_IMAGE, FROM_QWEN_IMAGE), (SD35, FROM_SD35), (NFT, FROM_NFT)],
    ids=["qwen", "sd35", "nft"],
)
def test_a_published_command(command: list[str], expected: dict[str, object]) -> None:
    """Every override is in the table or in the result, and none stops the run."""
    composed = compose_all(command)
    composed.check()
    to_config(composed.config)
    result = values_of(OmegaConf.to_container(composed.config, resolve=True))
    assert {key: result[key] for key in expected} == expected
    there = {row.given for row in composed.rows}
    assert all(line in there or line.partition("=")[0] in result for line in command)
    assert {row.kind for row in composed.rows} == {"translated", "no counterpart"}


def test_a_key_that_stops_the_run_does_not_stop_the_composition(
    capsys: pytest.CaptureFixture,
) -> None:
    command = [*SD35, "data.shuffle=False", f"{OTHER}model.custom_chat_template=prompt"]
    assert main(["train", "--cfg", "job", *command]) == 0
    shown = capsys.readouterr()
    assert "lora_rank: " in shown.out
    assert "actor_rollout_ref" not in shown.out
    assert main(["train", "--dry-run", *command]) == 2
    stopped = capsys.readouterr().err
    assert stopped.count("\nerror: ") == 1
    assert "compat.ignore=[data.shuffle,model.custom_chat_template]" in stopped
    with pytest.raises(ValueError, match="would change what is trained"):
        compose_config(command)
    with pytest.raises(ValueError, match=r"compat\.ignore names data\.shufle"):
        compose_config(["data.shuffle=False", "compat.ignore=[data.shuffle,data.shufle]"])


def test_a_run_prints_no_wall(capsys: pytest.CaptureFixture) -> None:
    """Every override of the command is in the summary, or counted as one that loses a prefix."""
    assert main(["train", "--dry-run", *SD35]) == 2
    shown, _, error = capsys.readouterr().err.partition("error: ")
    assert error.startswith("data.train_files")
    composed = compose_all(SD35)
    bare = [row for row in composed.rows if row.given == f"{OTHER}{row.here}"]
    assert f"translated      {len(bare)} that only lose {OTHER}\n" in shown
    words = shown.replace(",", " ").split()
    for row in composed.rows:
        if row not in bare:
            assert row.given in shown or row.key.removeprefix(OTHER) in words
    assert len(shown.splitlines()) < 40
    assert max(len(line) for line in shown.splitlines() if "vllm serve" not in line) < 200


def test_the_table_is_printed_once_and_has_three_columns(capsys: pytest.CaptureFixture) -> None:
    main(["train", "--cfg", "job", "actor_rollout_ref.model.lora_rank=8", "trainer.nnodes=2"])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["", "translated", "no counterpart"]
    words = zip(lines, ("given", OTHER, "trainer"), strict=True)
    assert len({line.index(word) for line, word in words}) == 1


def test_single_overrides_keep_the_bundled_job() -> None:
    """A verl-omni name alone does not change what the command runs."""
    config = compose_config([f"{OTHER}actor.optim.lr=1e-5", f"{OTHER}rollout.n=6"])
    assert (config.actor.optim.lr, config.rollout.n, config.rollout.pipeline.width) == (1e-5, 6, 64)
    assert not main(["train", "--cfg", "job", "actor_rollout_ref.rollout.n=6"])


def test_a_whole_command_takes_the_defaults_of_verl_omni() -> None:
    """Files that the command names are never replaced."""
    composed = compose_all(WHOLE)
    assert composed.config.rollout.pipeline.width == 512
    assert of_kind(composed, "stops the run") == [
        "reward.terms",
        "model.lora_rank",
        "model.target_modules",
        "rollout.n",
        "trainer.total_epochs",
    ]
    assert composed.rows[-1][1:3] == ("(what is not given)", "configs/verl_omni.yaml")
    assert compose_all(WHOLE, config_name="tiny_ocr").config.rollout.pipeline.width == 64
    chosen = compose_all([*WHOLE, "reward.terms.ocr=null", "reward.terms.jpeg.weight=1"])
    assert "reward.terms" not in of_kind(chosen, "stops the run")
    # A chosen file leaves nothing unsaid.
    compose_all(WHOLE, config_name="sd35_medium_ocr").check()
    compose_all([*WHOLE, "+experiment=sd35_medium_ocr_8xh100"]).check()


# --- Keys


def verl_omni_keys() -> list[str]:
    keys = []
    for line in (FOLDER / "keys.txt").read_text().splitlines():
        section, colon, names = line.partition(": ")
        if not line.startswith("#"):
            keys += [f"{section}.{name}" for name in names.split()] if colon else [section]
    return keys


def test_no_key_of_verl_omni_is_unknown() -> None:
    known = known_keys()
    keys = verl_omni_keys()
    assert len(keys) > 250
    for key in keys:
        found = translate([Setting(f"{key}=1", key, 1, "1")])
        targets = [line.partition("=")[0] for line in found.lines]
        assert found.rows or targets == [key], key
        free = ("rollout.engine_kwargs", "actor.rollout_correction")
        assert all(target in known or target.startswith(free) for target in targets), key


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("actor_rollout_ref.rollout.dtype=fp16", ("rollout.dtype", "fp16")),
        ("actor_rollout_ref.rollout.dtype=float32", ("rollout.dtype", "fp32")),
        ("actor.fsdp_config.dtype=float32", ("trainer.mixed_precision", "no")),
        ("actor_rollout_ref.model.lora_init_weights=True", ("model.lora_init", "default")),
        ("actor_rollout_ref.rollout.width=96", ("rollout.pipeline.width", 96)),
        ("rollout.val_kwargs.pipeline.height=96", ("rollout.val_kwargs.height", 96)),
        ("rollout.val_kwargs.pipeline.width=64", ("rollout.val_kwargs.width", 64)),
        ("actor_rollout_ref.rollout.noise_level=0.9", ("rollout.algo.noise_level", 0.9)),
        ("data.val_max_samples=-1", ("rollout.val_kwargs.n", None)),
        ("actor_rollout_ref.model.algorithm=mix_grpo", ("rollout.algo.window_sharing", "batch")),
        ("actor.fsdp_config.full_determinism=true", ("trainer.deterministic", True)),
        ("trainer.logger=[console,clearml]", ("trainer.logger", ["console"])),
        ("trainer.logger=console", ("trainer.logger", ["console"])),
        ("algorithm.adv_estimator=dance_grpo", ("algorithm.adv_estimator", "flow_grpo")),
        ("algorithm.bypass_mode=false", ("algorithm.rollout_correction.bypass_mode", False)),
    ],
)
def test_values_in_other_units(given: str, here: tuple[str, object]) -> None:
    assert rewritten(given).values[here[0]] == here[1]


def test_frames_of_evaluation_are_those_of_videos() -> None:
    given = [f"{OTHER}rollout.val_kwargs.pipeline.num_frames={count}" for count in (1, 9)]
    video = f"{OTHER}rollout.pipeline.num_frames=5"
    assert compose_config([given[0]]).rollout.val_kwargs.num_frames is None
    assert compose_config([video, given[1]]).rollout.val_kwargs.num_frames == 9
    with pytest.raises(ValueError, match=r"images have no frames: set rollout\.pipeline"):
        compose_config([given[1]])


@pytest.mark.parametrize(
    "given", ["rollout.val_kwargs.n=1", "trainer.device=cuda", "trainer.test_freq=-1"]
)
def test_own_words_stay(given: str) -> None:
    assert (rewritten(given).lines, rewritten(given).rows) == ([given], [])


@pytest.mark.parametrize(
    ("given", "updates"), [("steps=10", 40), ("steps_ratio=0.1", 76), ("steps=-1", 0)]
)
def test_a_warmup_counts_updates(given: str, updates: int) -> None:
    """8 prompts in mini-batches of 2: four updates a step; 190 steps."""
    config = compose_config([f"{OTHER}actor.optim.lr_warmup_{given}"])
    assert config.actor.optim.lr_warmup_steps == updates


@pytest.mark.parametrize(
    ("given", "terms"),
    [
        (["jpeg_compressibility.py"], {"jpeg": {"weight": 1 / 500}}),
        (["pkg://a.reward_score.pickscore_reward"], {"pickscore": {"weight": 1 / 26}}),
        (["a/genrm_ocr.py"], {"vlm_ocr": {"url": VLLM, "model": "a/b"}}),
        (
            ["a/genrm_ocr.py", "reward.terms.vlm_ocr.url=http://localhost:9/v1"],
            {"vlm_ocr": {"url": "http://localhost:9/v1", "model": "a/b"}},
        ),
        (["a/genrm_ocr.py", "reward.terms.ocr.weight=1"], {"ocr": {"weight": 1}}),
        (["mine.py", "reward.terms.jpeg.weight=2"], {"jpeg": {"weight": 2}}),
        (
            ["a/genrm_ocr.py", "reward.terms.jpeg.weight=0"],
            {"vlm_ocr": {"url": VLLM, "model": "a/b"}, "jpeg": {"weight": 0}},
        ),
    ],
)
def test_the_reward_of_a_command(given: list[str], terms: dict) -> None:
    function, *own = given
    composed = compose_all(
        [
            *WHOLE,
            "reward.reward_model.enable=True",
            "reward.reward_model.model_path=a/b",
            f"reward.custom_reward_function.path={function}",
            *own,
        ]
    )
    found = {name: term for name, term in composed.config.reward.terms.items() if term is not None}
    assert found == terms
    stopped = [key for key in of_kind(composed, "stops the run") if key.startswith("reward")]
    # No reward asks a reward model that the command starts.
    expected = ["reward.reward_model.enable"] if not own and "vlm_ocr" not in terms else []
    assert stopped == expected


def test_several_rewards_of_a_command() -> None:
    functions = "+reward.reward_functions"
    composed = compose_all(
        [
            *WHOLE,
            "reward.reward_model.enable=True",
            "reward.reward_model.model_path=a/b",
            "reward.custom_reward_function.path=pkg://verl_omni.reward_loop.reward_manager.multi",
            f"{functions}.ocr.path=a/genrm_ocr.py",
            f"{functions}.ocr.name=compute_score_ocr",
            f"{functions}.ocr.weight=0.5",
            f"{functions}.size.path=a/jpeg_compressibility.py",
            f"{functions}.size.weight=0.5",
        ]
    )
    assert composed.config.reward.terms == {
        "ocr": {"_target_": "vlm_ocr", "url": VLLM, "model": "a/b", "weight": 0.5},
        "size": {"_target_": "jpeg", "weight": 0.001},
    }
    stopped = of_kind(composed, "stops the run")
    assert not [key for key in stopped if key.startswith("reward")]
    other = compose_all([*WHOLE, f"{functions}.x.path=x.py", f"{functions}.ocr.path=genrm_ocr.py"])
    assert "reward.reward_functions.x.path" in of_kind(other, "stops the run")


def documented() -> list[tuple[str, str]]:
    """Returns the rows `override` -> `override` of the table in docs/migrating.md."""
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    section = page.partition("### Keys")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\S+)` \| (`.*`) \|$", section, re.MULTILINE)
    assert len(found) > 15
    return found


@pytest.mark.parametrize(("there", "here"), documented())
def test_the_documented_translations(there: str, here: str) -> None:
    rows = rewritten(there).rows
    assert [(row.kind, row.given) for row in rows] == [("translated", there)]
    for line in re.findall(r"`(.*?)`", here):
        assert line in rows[0].here.split("; ")


@pytest.mark.parametrize("peer", ["flow_grpo", "TRL", "diffusers' DreamBooth script"])
def test_a_setting_of_a_peer_is_answered_with_the_key_here(peer: str) -> None:
    """Reads the tables; a key here may be a whole section, and words with = are overrides.

    Who types a key of theirs is told the one beside it, or the first where there are not as many.
    """
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    section = page.partition(f"## Settings of {peer}\n")[2].partition("\n## ")[0]
    keys = []
    for left, right in re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE):
        theirs = re.findall(r"`(?:--)?(\w[\w.]*\w)(?:=\w+)?`", left)
        words = " ".join(re.findall(r"`(.*?)`", right)).split()
        here = [word.partition("=")[0] for word in words if re.match(r"[a-z]+\.", word)]
        keys += here
        wanted = here if len(here) == len(theirs) else here[:1] * len(theirs)
        for key, ours in zip(theirs, wanted, strict=False):
            with pytest.raises(ValueError, match=f"{re.escape(ours)}\\b"):
                compose_all([f"{key}=1"])
    assert len(keys) > 10
    free = ("rollout.engine_kwargs.", "reward.terms.")  # names below belong to others
    assert [key for key in keys if key not in known_keys() and not key.startswith(free)] == []


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ("actor_rollout_ref.model.target_modules=all-linear", True),
        ("actor_rollout_ref.model.lora_rank=0", True),
        ("actor_rollout_ref.model.algorithm=dpo", True),
        ("actor_rollout_ref.model.custom_chat_template=null", False),
        ("actor_rollout_ref.model.custom_chat_template='Draw {{ messages[-1].content }}'", True),
        ("actor_rollout_ref.model.custom_chat_template='{{ messages[-1].content }}'", False),
        ("actor_rollout_ref.model.custom_chat_template='{{'", True),
        ("actor_rollout_ref.model.custom_chat_template='{{ messages + 1 }}'", True),
        ("actor_rollout_ref.rollout.algo.sde_contiguous=False", True),
        ("actor_rollout_ref.rollout.pipeline.aspect_ratio=null", False),
        ("distillation.enabled=True", True),
        ("actor_rollout_ref.model.tokenizer_path=/elsewhere", True),
        ("actor_rollout_ref.rollout.quantization=fp8", True),
        ("actor_rollout_ref.actor.optim.min_lr_ratio=0.1", True),
        ("actor_rollout_ref.actor.optim.min_lr_ratio=0.0", False),
        ("data.shuffle=False", True),
        ("data.shuffle=True", False),
        ("data.train_max_samples=100", True),
        ("data.custom_cls.path=a.py", True),
        ("data.custom_cls.path=null", False),
        ("reward.reward_functions.ocr.weight=0.5", True),
        ("reward.custom_reward_function.path=mine/score.py", True),
        ("reward.custom_reward_function.path=null", False),
        ("reward.reward_model.enable=True", True),
        ("rollout.calculate_log_probs=False", True),
        ("trainer.total_epochs=3", True),
        ("trainer.v1.trainer_mode=separate_async", True),
        ("trainer.resume_from_path=/c", True),
        ("algorithm.trainer_type=direct_preference", True),
        ("algorithm.norm_adv_by_std_in_grpo=True", False),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs=32", False),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", False),
        ("trainer.n_gpus_per_node=8", False),
        ("trainer.v1.sampler.drop_incomplete_groups=False", False),
        ("trainer.v1.sampler.drop_incomplete_groups=True", True),
        ("algorithm.filter_groups.metric=acc", True),
        ("algorithm.filter_groups.metric=seq_reward", False),
        ("algorithm.filter_groups.metric=null", False),
        ("algorithm.filter_groups.max_num_gen_batches=0", False),
        ("ray_kwargs.ray_init.num_cpus=4", False),
        ("+ray_kwargs.ray_init.runtime_env.x=4", False),
        ("global_profiler.steps=[1,2]", False),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", False),
        ("actor_rollout_ref.actor.diffusion_loss.mix_beta=0.1", False),
    ],
)
def test_a_key_that_would_change_the_training_stops_the_run(given: str, stops: bool) -> None:
    rows = rewritten(given).rows
    assert [row.kind for row in rows] == ["stops the run" if stops else "no counterpart"]
    if not stops:
        check(rows, [])
        return
    with pytest.raises(ValueError, match="would change what is trained") as error:
        check(rows, [])
    assert given in str(error.value)
    key = rows[0].key
    for ignored in (key, key.removeprefix(OTHER).rpartition(".")[0]):
        check(resolved(rows, [ignored]), [ignored])


def test_the_estimator_says_what_is_divided_by() -> None:
    for estimator, switches in {
        "flow_grpo": "norm_adv_by_std_in_grpo=True global_std=True",
        "grpo": "norm_adv_by_std_in_grpo=True adv_estimator=grpo",
        "dr_grpo": "norm_adv_by_std_in_grpo=False global_std=False",
        "gdpo": "global_std=True adv_estimator=gdpo",
    }.items():
        config = compose_config([f"algorithm.{switch}" for switch in switches.split()])
        assert config.algorithm.adv_estimator == estimator


def test_dapos_filter_of_groups_has_the_same_words_and_is_bounded() -> None:
    key = "algorithm.filter_groups"
    on, most, metric = f"{key}.enable=True", f"{key}.max_num_gen_batches", f"{key}.metric=score"
    found = to_config(compose_config([on, f"{most}=7", metric])).algorithm.filter_groups
    assert (found.enable, found.max_num_gen_batches) == (True, 7)
    with pytest.raises(ValueError, match="refills are bounded"):
        compose_config([on, f"{most}=0"])


def test_a_window_range_without_a_size_has_no_effect_in_verl_omni() -> None:
    window = f"{OTHER}rollout.algo.sde_window_range=[0,3]"
    whole = compose_all([*WHOLE, window])
    assert "rollout.algo.sde_window_range" in of_kind(whole, "no counterpart")
    assert whole.config.rollout.algo.sde_window_range is None
    sized = compose_all([*WHOLE, window, f"{OTHER}rollout.algo.sde_window_size=2"])
    assert sized.config.rollout.algo.sde_window_range == [0, 3]
    of_file = compose_config([window])  # and so is its size
    assert of_file.rollout.algo.sde_window_range == [0, 3]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("actor.fsdp_config.param_ofload=True", ["did you mean actor.fsdp_config.param_offload?"]),
        ("actor.optim.lrr=1", ["unknown key actor.optim.lrr", "did you mean actor.optim.lr?"]),
        ("critic.x=1", ["unknown key critic.x"]),
        ("actor.grad_clip=1 actor.optim.clip_grad=2", ["grad_clip=1", "clip_grad=2", "contradict"]),
    ],
)
def test_unknown_and_contradictory_keys(overrides: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"unknown key|contradict") as error:
        compose_all([f"{OTHER}{override}" for override in overrides.split()])
    for word in words:
        assert word in str(error.value)


def test_an_override_in_own_words_after_a_command_replaces_what_the_command_says() -> None:
    composed = compose_all([*SD35, "trainer.seed=7", "rollout.n=4", f"{OTHER}model.lora_rank=16"])
    config = composed.config
    assert (config.trainer.seed, config.rollout.n, config.model.lora_rank) == (7, 4, 16)
    told = {row.given: row.here for row in composed.rows}
    assert told["data.seed=42"] == "replaced by trainer.seed=7"
    assert told[f"{OTHER}rollout.n=8"] == "replaced by rollout.n=4"
    again = [row.given for row in composed.rows if row.kind == "given again"]
    assert again == [f"{OTHER}model.lora_rank=32", "data.seed=42", f"{OTHER}rollout.n=8"]


def test_the_last_of_several_settings_of_a_key_counts() -> None:
    given = ["data.shuffle=False", "data.shuffle=True", "data.seed=5", "trainer.seed=5"]
    given += ["rollout.n=8", "rollout.n=12", "rollout.n=12"]
    composed = compose_all(given)
    composed.check()
    found = [row[:3] for row in composed.rows]
    assert found[:2] == [
        ("given again", "data.shuffle=False", "replaced by data.shuffle=True"),
        ("given again", "rollout.n=8", "replaced by rollout.n=12"),
    ]
    assert [given for _, given, _ in found[2:]] == ["data.shuffle=True", "data.seed=5"]

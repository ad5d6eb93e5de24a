"""A dry run refuses what a run refuses, with the same words and exit code, and nothing is loaded.

A table below has refusals of every check that needs no weights; the tests of a room have all of
its own, tests/spec/test_rules.py those of two sections. What only loaded weights or the other
processes of a run can tell is not in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from support.compositions import checked_config
from support.marks import slow
from support.runs import NAMES
from transformers import AutoModelForCausalLM

from flowgrpo_rc import plugins
from flowgrpo_rc.cli import main
from flowgrpo_rc.commands import train
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.models import base
from flowgrpo_rc.records import run_folder
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.rollout import vllm_engine, vllm_omni_engine
from flowgrpo_rc.spec import check_engine
from flowgrpo_rc.spec.check_folder import FIRST_NEED

RC = "algorithm.rollout_correction"
FILTER = "algorithm.filter_groups"
NO_MEANS = "rollout.name=support.faulty_engines.NoMeans"
CACHE = "rollout.cache.every=2 rollout.cache.window=true"
GUARD = "actor.diffusion_loss.loss_mode=grpo_guard"
TEXT = ("--config-name=token_grpo", "trainer.device=cpu", "trainer.output_dir=run")

# Overrides of the small run, and words of the message.
OUT_OF_RANGE = [
    ("rollout.n=1", "rollout.n=1"),
    ("actor.optim.lr=inf", "actor.optim.lr=inf"),
    ("actor.train_n=0", "actor.train_n=0: give at least 1"),
    ("rollout.algo.sde_window_range=[3]", "sde_window_range=[3]: give two step indices"),
    ("rollout.algo.tail=heun", "rollout.algo.tail='heun': allowed are euler, ab2"),
    ("rollout.algo.tail_steps=0", "rollout.algo.tail_steps=0: give at least 1"),
    ("rollout.val_kwargs.batch_size=0", "rollout.val_kwargs.batch_size=0"),
    ("rollout.pipeline.condition_images=1", "rollout.pipeline.condition_images=1"),
    ("rollout.pipeline.condition_images=-1", "condition_images=-1: give at least 0"),
    (f'{RC}.rollout_rs_threshold="2.0_0.5"', "rollout_rs_threshold"),
    ("rollout.dtype=int3", "rollout.dtype='int3'"),
    ("rollout.dtype=int4", "set rollout.quantization=int4"),
    ("model.lora_rank=100000", "model.lora_rank=100000: no layer with a LoRA has a larger rank"),
    ("trainer.max_time=2hours", "trainer.max_time='2hours': give seconds, or a duration"),
    ("rollout.staleness=-1", "rollout.staleness=-1"),
    ("rollout.algo.sde_type=ode", "rollout.algo.sde_type='ode'"),
    ("rollout.algo.noise_level=0", "rollout.algo.noise_level"),
    ("rollout.algo.log_prob_convention=peers", "log_prob_convention=peers"),
    ("rollout.algo.sde_window_range=[0,9]", "sde_window_range"),
    ("rollout.pipeline.true_cfg_scale=0.5", "true_cfg_scale=0.5"),
    ("rollout.pipeline.num_frames=0", "num_frames=0"),
    ("rollout.val_kwargs.n=0", "rollout.val_kwargs.n=0"),
    ("rollout.micro_batch_size_per_gpu=0", "rollout.micro_batch_size_per_gpu=0"),
    ("model.dtype=int8", "model.dtype='int8'"),
    ("model.lora_rank=0", "model.lora_rank=0: a LoRA is trained and never the weights themselves"),
    ("model.path=/does/not/exist", "model.path=/does/not/exist"),
    ("model.lora_path=/does/not/exist", "model.lora_path=/does/not/exist"),
    ("actor.optim.lr=-1", "actor.optim.lr=-1"),
    ("actor.optim.name=sgd", "actor.optim.name='sgd'"),
    ("actor.steps_per_forward=0", "actor.steps_per_forward=0: give at least 1"),
    ("algorithm.adv_estimator=gae", "algorithm.adv_estimator='gae'"),
    ("trainer.max_time=0", "trainer.max_time"),
    ("trainer.timeout_s=0", "trainer.timeout_s=0"),
    ("trainer.strategy=fsdp", "trainer.strategy='fsdp'"),
    ("trainer.device=gpu", "trainer.device='gpu': allowed are auto, cuda, cpu"),
    ("trainer.test_freq=-2", "trainer.test_freq=-2: give at least -1"),
    ("trainer.logger=[console,paper]", "paper"),
]
IMAGES = [
    # Not a setting, or not a value of it.
    ("actor.optim.learning_rate=1", "actor.optim.learning_rate"),
    ("+new.key=1", "unknown key new.key"),
    ("actor.optim.lr=fast", "fast"),
    ("data.shuffle=False", "compat.ignore=[data.shuffle]"),
    # A section, or a list, is something else.
    ("actor=2", "actor=2: a section of keys, such as actor.diffusion_loss"),
    ("actor_rollout_ref.actor=2", "actor=2: a section of keys"),
    ("rollout.algo=sde", "rollout.algo='sde': a section of keys"),
    ("reward.terms=3", "reward.terms=3: a section of keys"),
    (f"{RC}.rollout_rs=seq_mean_k1,token_k1", "must be a list"),
    # Sizes that do not go together.
    ("actor.ppo_mini_batch_size=3", "data.train_batch_size=4"),
    ("actor.ppo_micro_batch_size_per_gpu=3", "4 samples"),
    ("data.train_batch_size=64", "data.train_batch_size=64"),
    (
        "rollout.merge_lora=true rollout.quantization=int8",
        "rollout.merge_lora=true needs frozen weights that nothing has",
    ),
    ("rollout.merge_lora=true model.quantization=int8", "model.quantization"),
    ("rollout.merge_lora=round", "rollout.merge_lora=round: give true, false, null or rounded"),
    ("rollout.merge_lora=rounded rollout.name=vllm_omni", "rollout.merge_lora=rounded has no"),
    (
        "rollout.quantization=int8 model.quantization=int8",
        "which model.quantization=int8 rules out: drop one",
    ),
    ("model.quantization=int8 model.dtype=fp64 trainer.mixed_precision=no", "dtype=fp64"),
    ("model.quantization=fp8", "model.quantization='fp8': allowed are int8, int4, nf4"),
    ("rollout.algo.shared_prefix=true rollout.algo.window_sharing=sample", "shared_prefix"),
    ("actor.train_n=1 actor.ppo_micro_batch_size_per_gpu=4", "2 samples of a min"),
    ("trainer.tf32=true rollout.name=vllm_omni rollout.dtype=fp32", "set rollout.dtype=bf16"),
    # Without effect.
    ("rollout.pipeline.condition_pixels=99", "condition_pixels=99 has no effect"),
    ("rollout.algo.tail=ab2 rollout.algo.sde_window_range=[1,4]", "tail=ab2 has no effect"),
    ("data.negative_prompt=blurry", "data.negative_prompt='blurry'"),
    ("model.offload_idle=true", "model.offload_idle=true"),
    ("model.prompt_cache=memory data.replay_dir=x", "model.prompt_cache=memory needs prompts"),
    ("model.prompt_cache=memory rollout.workers=1", "rollout.workers=0"),
    (f"{FILTER}.enable=true {FILTER}.max_num_gen_batches=1", "batches=1: give at least 2"),
    (f"{FILTER}.max_num_gen_batches=5", "max_num_gen_batches has no effect without"),
    ("model.prompt_cache=memory rollout.name=vllm_omni", "set rollout.name=diffusers"),
    ("algorithm.adv_estimator=flow_grpo algorithm.global_std=false", "adv_estimator=grpo"),
    # Blocks that are used again.
    ("rollout.cache.every=0", "rollout.cache.every=0"),
    ("rollout.cache.window=true", "cache.window=true has no effect with every=1"),
    ("rollout.cache.every=3", "rollout.cache.every=3 has no effect: no step to skip"),
    (f"{CACHE} rollout.name=vllm_omni", "rollout.cache.every=2 has no effect with rollout.name"),
    (CACHE, "nothing to reuse between the first block and the last: a SD3Tr"),
    ("model.target_modules=to_q", "model.target_modules: give a list, model.target_modules=[...]"),
    ("rollout.cache.every=null", "rollout.cache.every=null: give a value"),
    ("rollout.val_kwargs.guidance_scale=inf", "guidance_scale=inf: give at least 0"),
    ("model.prompt_cache=", "model.prompt_cache=: give memory, or a folder with a /"),
    # Samples that are drawn again.
    ("rollout.redraw=true", "set actor.train_n below rollout.n, or drop it"),
    # The rollout correction.
    (f"{RC}.rollout_is=always", "rollout_is='always'"),
    (f"{RC}.centered=maybe", "maybe"),
    # Prompts and rewards.
    ("data.train_files=/does/not/exist.txt", "/does/not/exist.txt"),
    ("data.val_files=null", "data.val_files"),
    ("data.allow_overlap=false", "8 of 8 held-out prompts are training prompts, too, the first is"),
    ("reward.terms.jpeg.objctive=x", "objctive"),
    ("reward.terms.jpeg=null reward.terms.exact_match.weight=1", "exact_match scores texts"),
    # The engine.
    ("rollout.name=no_such_engine", "no plug-in 'no_such_engine'"),
    ("rollout.name=transformers_engine", "model.kind=causal_lm"),
    (f"{NO_MEANS} {RC}.centered=true", "does not record the means"),
    (f"{NO_MEANS} {RC}.rollout_rs=step_kl {RC}.rollout_rs_threshold=1", "rollout_rs=step_kl reads"),
    (f"{NO_MEANS} {RC}.bypass_mode=true {GUARD}", "loss_mode=grpo_guard (in bypass mode) reads"),
    ("rollout.engine_kwargs.foo=1", "rollout.engine_kwargs.foo: unknown option"),
    ("rollout.quantization=int3", "rollout.quantization='int3'"),
    ("rollout.name=vllm_omni rollout.compile=true", "rollout.compile=true has no effect"),
    (
        "rollout.name=vllm_omni rollout.quantization=int8",
        "has no effect with rollout.name=vllm_omni",
    ),
    ("rollout.name=vllm_omni rollout.engine_kwargs.timeout=3", "did you mean 'timeout_s'?"),
    ("rollout.name=vllm_omni rollout.engine_kwargs.quantization=fp8", "does not quantize"),
    # The model.
    ("rollout.pipeline.num_frames=9", "makes images"),
    ("rollout.pipeline.true_cfg_scale=4", "rollout.pipeline.true_cfg_scale=4"),
    ("rollout.val_kwargs.true_cfg_scale=4", "rollout.val_kwargs.true_cfg_scale=4"),
    ("rollout.pipeline.max_sequence_length=513", "0 to 512"),
    ("rollout.pipeline.height=33", "rollout.pipeline.height=33"),
    ("model.target_modules=[to_nothing]", "ends in to_nothing; near to it are to_"),
    ("model.target_modules=[to_q,attn]", "attn is a Attention, and a LoRA goes on linear layers"),
    ("model.target_modules=[attn]", "near to it are attn.add_k_proj, attn.add_q_proj"),
    ("model.target_modules=[norm]", "norm is a "),
    ("actor.kl_reference=begin", "base, start"),
    ("model.path={flux} rollout.pipeline.height=20", "multiples of 8"),
    ("model.path={sana} rollout.name=vllm_omni", "model.path is a SanaPipeline"),
    ("model.path={schnell} rollout.val_kwargs.guidance_scale=2", "guidance_scale=2.0"),
    ("model.path={qwen}", "rollout.pipeline.true_cfg_scale is not set"),
    ("model.path={wan} rollout.pipeline.num_frames=5", "reward.terms.jpeg scores images"),
    ("model.path={tmp}", "model_index.json"),
    ("model.path={other}", "PixArtAlphaPipeline"),
    # The folder.
    ("trainer.output_dir=/proc/nothing", "trainer.output_dir=/proc/nothing"),
    ("model.prompt_cache=/proc/nothing/x", "model.prompt_cache=/proc/nothing/x cannot be written"),
    ("data.replay_dir={tmp}", "trainer.save_rollouts"),
]
TEXTS = [
    ("model.kind=diffusion", "model.path"),
    ("rollout.name=diffusers_engine", "model.kind=diffusion"),
    ("reward.terms.jpeg.weight=1", "reward.terms.jpeg scores images"),
    ("rollout.prompt_length=3", "rollout.prompt_length=3"),
    ("rollout.temperature=0", "rollout.temperature"),
    ("algorithm.adv_estimator=rloo algorithm.global_std=true", "adv_estimator=flow_grpo"),
    ("rollout.compile=true", "rollout.compile=true has no effect"),
    ("rollout.engine_kwargs.speed=2", "rollout.engine_kwargs.speed"),
]


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights ends the test."""
    fail = Mock(side_effect=AssertionError("a model was loaded"))
    monkeypatch.setattr(base, "load_weights", fail)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


class Answer(NamedTuple):
    """What a command said to a user."""

    code: int
    error: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command in this process."""

    def answer(*words: str) -> Answer:
        capsys.readouterr()
        return Answer(main(words), capsys.readouterr().err)

    return answer


def dry_run_refuses(ask: Ask, given: list[str], words: str, *, code: int = 2) -> Answer:
    dry = ask("train", "--dry-run", *given)
    assert dry.code == code, dry.error
    *again, error = dry.error.splitlines()
    assert error.startswith("error: ")
    assert all("given" in line for line in again[:1]), again
    assert words in error
    return dry


def refused(ask: Ask, given: list[str], words: str, *, code: int = 2) -> None:
    """A dry run and a run say the same, and it holds the words."""
    assert dry_run_refuses(ask, given, words, code=code) == ask("train", *given)


def test_a_run_asks_the_check_of_a_dry_run(
    ask: Ask, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tables below need the answer of the dry run alone."""
    monkeypatch.setattr(train, "check_run", Mock(side_effect=ValueError("not this one")))
    refused(ask, overrides, "not this one")


@pytest.mark.parametrize(
    ("further", "words"), [*IMAGES, *(slow(*case) for case in OUT_OF_RANGE)], ids=str
)
def test_images(
    ask: Ask,
    overrides: list[str],
    saved: Callable[[str], Path],
    tmp_path: Path,
    further: str,
    words: str,
) -> None:
    places = {name: saved(kind) for name, kind in NAMES.items() if f"{{{name}}}" in further}
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    for name, place in (places | {"tmp": tmp_path, "other": other}).items():
        further = further.replace(f"{{{name}}}", str(place))
    dry_run_refuses(ask, [*overrides, *further.split(" ")], words)


@pytest.mark.parametrize(("further", "words"), TEXTS, ids=str)
def test_texts(ask: Ask, further: str, words: str) -> None:
    dry_run_refuses(ask, [*TEXT, *further.split(" ")], words)


# What is installed, and the launcher
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("rollout.quantization=fp8", "fp8 needs torchao: pip install 'torchao"),
        ("actor.optim.name=adamw_8bit", "adamw_8bit needs torchao: pip install 'torchao"),
        ("rollout.compile=true", "C++ compiler"),
        ("rollout.name=vllm_omni", "is not installed: pip install 'vllm"),
        ("rollout.name=vllm", "is not installed: pip install 'vllm"),
    ],
)
def test_what_is_not_installed(
    ask: Ask, overrides: list[str], monkeypatch: pytest.MonkeyPatch, further: str, words: str
) -> None:
    for module in (plugins, vllm_engine, vllm_omni_engine):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(check_engine.shutil, "which", lambda name: None)
    dry_run_refuses(ask, [*(TEXT if further.endswith("=vllm") else overrides), further], words)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Hub's cache on a machine without network; it is empty."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetch(cache: Path, repository: str, *names: str) -> None:
    """Puts empty files of a repository into the cache."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("1" * 40)
    for name in names:
        file = home / "snapshots" / ("1" * 40) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


PICKSCORE = "reward.terms.pickscore.path=yuvalkirstain/PickScore_v1"
JUDGE = "reward.terms.judge={_target_: vlm_judge, path: some/judge}"


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("reward.terms.pickscore.weight=1", PICKSCORE),
        ("trainer.suites=[pickscore]", f"suite pickscore: {PICKSCORE}"),
        (JUDGE, "reward.terms.judge.path=some/judge"),
    ],
)
def test_weights_of_a_reward_that_cannot_be_had(
    ask: Ask, overrides: list[str], cache: Path, further: str, words: str
) -> None:
    dry_run_refuses(ask, [*overrides, further], words)


def test_weights_of_a_reward_in_the_cache(ask: Ask, overrides: list[str], cache: Path) -> None:
    given = [*overrides, "reward.terms.pickscore.weight=1"]
    fetch(cache, "yuvalkirstain/PickScore_v1", "config.json", "model.safetensors")
    words = "reward.terms.pickscore.processor=laion/CLIP"
    assert "hf download laion/" in dry_run_refuses(ask, given, words).error
    fetch(cache, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "preprocessor_config.json")
    assert ask("train", "--dry-run", *given).code == 0


def test_a_local_reward_without_weights(ask: Ask, overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text("{}")
    given = [*overrides, f"reward.terms.clip.path={tmp_path / 'clip'}"]
    dry_run_refuses(ask, given, f"reward.terms.clip.path={tmp_path / 'clip'}: no file of weights")


def test_shapes_that_low_precision_does_not_allow(ask: Ask, overrides: list[str]) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    dry_run_refuses(ask, [*overrides, "actor.optim.name=adamw_8bit"], "adamw_8bit has no effect")


@pytest.mark.parametrize(
    ("variables", "further", "words"),
    [
        ({"WORLD_SIZE": "2"}, "actor.ppo_mini_batch_size=1", "2 processes"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "rollout.n=2", "fsdp_version=1"),
    ],
)
def test_the_launcher(
    ask: Ask,
    overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    further: str,
    words: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dry_run_refuses(ask, [*overrides, further], words)


# The output folder, and saved rollouts
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(overrides: list[str], tmp_path: Path) -> RunFolder:
    """The folder of a run with these overrides; its checkpoint has no files."""
    made = RunFolder(tmp_path / "run")
    config = checked_config(compose_config(overrides))
    made.create(dataclasses.asdict(config), torch.device("cpu"), 1, {})
    MetricsFile(made.metrics).append(0, {"val/reward": 0.5})
    (made.checkpoints / "step_1").mkdir(parents=True)
    return made


def test_a_folder_that_holds_a_run(ask: Ask, overrides: list[str], folder: RunFolder) -> None:
    dry_run_refuses(ask, [*overrides, "trainer.resume_mode=disable"], "holds a run already")
    changed = "actor.optim.lr: 0.001 there, 0.002 now). Another trainer.output_dir starts a fresh"
    dry_run_refuses(ask, [*overrides, "actor.optim.lr=2e-3"], changed)
    dry_run_refuses(ask, overrides, "manifest.json is missing or damaged", code=1)
    with folder.locked():
        refused(ask, overrides, "is in use by a run that is still going on")


def test_too_little_room(ask: Ask, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The LoRA's size is known before it is loaded."""
    disk = Mock(free=FIRST_NEED + 2**10)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: disk)
    dry_run_refuses(ask, overrides, "MiB free, a run needs at least")


def test_saved_rollouts(ask: Ask, overrides: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    spec = dataclasses.asdict(checked_config(compose_config(overrides)).rollout.spec())
    header = {"kind": "diffusion", "spec": spec | {"guidance_scale": 7.0}, "origin": {}}
    file = saved / "step_000001_process_0_of_1.safetensors"
    save_file({"group": torch.zeros(1)}, file, metadata={"rollout": json.dumps(header)})
    replay = [*overrides, f"data.replay_dir={saved}"]
    dry_run_refuses(ask, replay, "guidance_scale: 7.0 there")
    file.write_bytes(file.read_bytes()[:20])
    dry_run_refuses(ask, replay, "cannot be read")
    file.rename(saved / "step_000002_process_0_of_1.safetensors")
    dry_run_refuses(ask, replay, "must hold steps 1 to 2")


# The other commands
# --------------------------------------------------------------------------------------------------


def test_the_small_runs_are_sound(ask: Ask, overrides: list[str], tmp_path: Path) -> None:
    """So each refusal above is that of its own override; and a dry run leaves nothing."""
    assert ask("train", "--dry-run", *overrides).code == 0
    assert ask("train", "--dry-run", *TEXT).code == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "further",
    [
        "rollout.name=no_such_engine",
        "rollout.name=vllm_omni rollout.compile=true",
        "actor.ppo_mini_batch_size=3",
    ],
)
def test_a_plan_and_a_calibration_refuse_it_too(
    ask: Ask, overrides: list[str], tmp_path: Path, further: str
) -> None:
    given = [*overrides, *further.split(" ")]
    dry = ask("train", "--dry-run", *given)
    assert dry.code == 2
    assert ask("plan", *given) == dry
    assert ask("calibrate", "--out", str(tmp_path / "out"), *given) == dry
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_calibration_needs_a_machine_and_a_plan_does_not(
    ask: Ask, overrides: list[str], tmp_path: Path
) -> None:
    given = [*overrides, "model.offload_idle=true", "data.train_files=/on/the/other/machine.txt"]
    assert ask("plan", *given).code == 0
    for words, error in ((given, "/on/the/other/machine.txt"), (given[:-1], "offload_idle=true")):
        found = ask("calibrate", "--out", str(tmp_path / "out"), *words)
        assert found.code == 2
        assert error in found.error


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("data.val_files=/does/not/exist.txt", "/does/not/exist.txt"),
        ("reward.terms.jpeg.objctive=x", "objctive"),
        ("rollout.pipeline.height=33", "rollout.pipeline.height=33"),
        ("--suite pickscore", PICKSCORE),
    ],
)
def test_an_evaluation_is_checked(
    ask: Ask, folder: RunFolder, cache: Path, further: str, words: str
) -> None:
    folder.lora.mkdir()
    found = ask("eval", str(folder.root), *further.split())
    assert found.code == 2
    assert words in found.error

"""Checks that what settings leave open is settled before anything else is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support.compositions import config_of

from flowgrpo_rc.batch import PromptBatch
from flowgrpo_rc.build import make_processes
from flowgrpo_rc.commands.opening import check_same_rewards
from flowgrpo_rc.config import settle
from flowgrpo_rc.config.check_inputs import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.settle import settle_compile, settled
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.rewards import ocr
from flowgrpo_rc.rollout import compiling
from flowgrpo_rc.rollout import devices as module
from flowgrpo_rc.rollout.engine import ImageRequest

RC = "algorithm.rollout_correction"
ALIGNED = """actor.replay=aligned actor.steps_per_forward=1 actor.train_n=null
    actor.ppo_micro_batch_size_per_gpu=12 rollout.micro_batch_size_per_gpu=12
    rollout.algo.shared_prefix=false"""
NO_MEANS = "rollout.name=support.faulty_engines.NoMeans"


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    module.faster_dtype.cache_clear()
    yield
    module.faster_dtype.cache_clear()


def seconds(monkeypatch, *, fp32: float, bf16: float) -> None:
    """Lets products take given times on a clock that only they move."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    class Product:
        def __init__(self, duration: float) -> None:
            self.duration = duration

        def __matmul__(self, other: Product) -> None:
            clock[0] += self.duration

    durations = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr(module.torch, "ones", lambda *shape, dtype: Product(durations[dtype]))


@pytest.mark.parametrize(
    ("fp32", "bf16", "dtype"), [(1.0, 0.5, "bf16"), (1.0, 1.2, "fp32"), (1.0, 0.9, "fp32")]
)
def test_the_faster_precision_of_a_cpu_is_taken(monkeypatch, fp32, bf16, dtype):
    seconds(monkeypatch, fp32=fp32, bf16=bf16)
    assert module.faster_dtype(torch.device("cpu")) == dtype


def test_a_gpu_samples_in_bf16():
    assert module.faster_dtype(torch.device("cuda")) == "bf16"


@pytest.mark.parametrize(("gain", "faster"), [(9, True), (1.1, False)])
def test_onednn_is_taken_where_it_is_faster(monkeypatch, tmp_path: Path, gain, faster):
    module.onednn_is_faster.cache_clear()
    times = iter([[0.9], [0.9 / gain]])
    monkeypatch.setattr(module.timeit, "repeat", lambda *_, **__: next(times))
    auto = "model.onednn=auto"
    assert settled(config_of(auto)).model.onednn is faster
    assert settled(config_of(auto), torch.device("cuda")).model.onednn is False
    # Without fp32 layers there is nothing to compute, though the CPU is the same.
    assert settled(config_of(auto, "model.dtype=bf16")).model.onednn is False
    assert settled(config_of(auto, "model.quantization=int8")).model.onednn is False
    # A run that goes on has its own, and times nothing.
    output = begun(tmp_path, f"model.onednn={str(not faster).lower()}")
    assert settled(config_of(output, auto)).model.onednn is not faster
    module.onednn_is_faster.cache_clear()


def begun(folder: Path, override: str) -> str:
    """Makes the folder of a run with one checkpoint, and returns the override that names it."""
    output = f"trainer.output_dir={folder}"
    run = RunFolder(folder)
    run.create(asdict(config_of(output, override)), torch.device("cpu"), 1, {})
    state = {"update": {}, "health": {}}
    save_checkpoint(run.checkpoints, Checkpoint(step=1, tensors={}, state=state), keep=1)
    return output


def test_a_precision_that_is_known_is_not_measured(tmp_path: Path, monkeypatch):
    """It is given, or the run goes on with it."""
    monkeypatch.setattr(settle, "faster_dtype", lambda device: pytest.fail("measured"))
    assert settled(config_of("rollout.dtype=fp16")).rollout.dtype == "fp16"
    output = begun(tmp_path, "rollout.dtype=bf16")
    assert settled(config_of(output, "rollout.dtype=auto")).rollout.dtype == "bf16"


@pytest.mark.parametrize("found", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("term", ["ocr", "video_ocr"])
def test_the_engine_of_ocr_is_settled_and_a_run_that_goes_on_keeps_it(
    tmp_path: Path, monkeypatch, found: str, term: str
):
    where = None if found == "onnxruntime" else object()
    monkeypatch.setattr(ocr, "find_spec", lambda name: where)

    def engine(*overrides: str) -> str | None:
        others = () if term == "ocr" else ("reward.terms.ocr=null",)
        config = config_of(*others, f"reward.terms.{term}.weight=2", *overrides)
        kept = settled(config).reward.terms[term]
        assert kept["weight"] == 2
        return kept.get("engine")

    key = f"reward.terms.{term}.engine"
    assert engine() == found
    assert engine(f"{key}=auto") == found
    assert engine(f"{key}=onnxruntime") == "onnxruntime"
    for kept in ("onnxruntime", "openvino"):
        output = begun(tmp_path / kept, f"{key}={kept}")
        assert engine(output) == kept
    assert engine(begun(tmp_path / "old", "trainer.test_freq=0")) is None  # reads as it did


def test_machines_that_settle_different_engines_are_told():
    def check(*engines: str) -> None:
        told = [f"reward.terms.ocr.engine={engine}" for engine in engines]
        processes = cast(Processes, SimpleNamespace(gather_objects=lambda mine: mine + told[1:]))
        check_same_rewards(config_of(told[0]), config_of(), processes)

    check("openvino", "openvino")
    with pytest.raises(ValueError, match=r"engine=onnxruntime or reward\.\S+engine=openvino: give"):
        check("openvino", "onnxruntime")


@pytest.mark.parametrize(("side", "count"), [(64, 8), (128, 2), (512, 1)])
def test_a_cpu_decodes_as_many_pictures_as_stay_in_its_cache(tmp_path: Path, side: int, count: int):
    size = [f"rollout.pipeline.{name}={side}" for name in ("height", "width")]
    auto = "model.decode_batch_size=auto"
    found = [settled(config_of(auto, *size), torch.device(name)) for name in ("cpu", "cuda")]
    assert [config.model.decode_batch_size for config in found] == [count, None]
    output = begun(tmp_path, "model.decode_batch_size=5")
    assert settled(config_of(output, auto, *size)).model.decode_batch_size == 5


def centered(*overrides: str) -> bool | None:
    return settled(config_of(*overrides)).algorithm.rollout_correction.centered


def test_images_are_centered_unless_their_rollout_has_no_means():
    assert config_of().algorithm.rollout_correction.centered is None
    assert centered() is True
    assert centered(f"{RC}.bypass_mode=false") is True
    assert centered(f"{RC}.centered=false") is False
    assert centered(NO_MEANS) is False


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_goes_on_keeps_its_log_ratio(tmp_path: Path, kept: bool):
    output = begun(tmp_path, f"{RC}.centered={str(kept).lower()}")
    assert centered(output, NO_MEANS) is kept


@pytest.mark.parametrize("columns", [["prev_sample_mean", "latents"], ["latents"]])
def test_saved_images_are_centered_if_they_hold_means(tmp_path: Path, columns: list[str]):
    path = tmp_path / "rollouts" / "step_00001_process_0_of_1.safetensors"
    path.parent.mkdir()
    save_file({name: torch.zeros(1) for name in columns}, path, metadata={"rollout": "{}"})
    assert centered(f"data.replay_dir={tmp_path}") is ("prev_sample_mean" in columns)


def test_text_is_not_centered():
    config = settled(to_config(compose_config([], config_name="token_grpo")))
    assert config.algorithm.rollout_correction.centered is False


def merges(*overrides: str) -> bool | None:
    return settled(config_of("rollout.merge_lora=null", *overrides)).rollout.merge_lora


def test_a_lora_is_merged_where_that_loses_nothing():
    assert merges() is True
    assert merges("rollout.dtype=bf16") is True  # fp32 weights are rounded to bf16 anyway
    assert merges("model.dtype=bf16") is False
    assert merges("rollout.quantization=int8") is False
    assert merges("model.quantization=int8") is False
    assert merges("trainer.strategy=fsdp2") is False
    assert merges(*ALIGNED.split()) is False
    assert merges("rollout.name=vllm_omni") is False


@pytest.mark.parametrize("given", [True, False, "rounded"])
def test_a_given_choice_to_merge_stands(given: bool | str):
    config = settled(config_of(f"rollout.merge_lora={given}", "rollout.quantization=int8"))
    assert config.rollout.merge_lora == given


@pytest.mark.parametrize("kept", [True, False, "rounded"])
def test_a_run_that_goes_on_keeps_its_weights_merged_or_not(tmp_path: Path, kept: bool | str):
    output = begun(tmp_path, f"rollout.merge_lora={kept}")
    assert merges(output) == kept
    assert merges(output, "trainer.strategy=fsdp2") == (kept == "rounded" and kept)


@pytest.mark.parametrize(
    ("overrides", "clip"),
    [
        ([], "auto:16"),
        (["+correction=recomputed"], 1e-3),
        ([f"{RC}=decoupled_seq_is_rs"], 1e-3),
        (["data.replay_dir=saved"], 1e-3),
        ([f"{RC}=bypass_pg_geo_rs_seq_tis"], 1e-4),
        (["actor.diffusion_loss.loss_mode=flow_dppo"], 1e-4),
        (["actor.diffusion_loss.loss_mode=grpo_guard"], "auto:16"),
    ],
)
def test_a_clip_follows_the_mismatch_only_where_there_is_one(overrides, clip):
    assert config_of(*overrides).with_fixed_clip().actor.diffusion_loss.clip_ratio == clip


# --- Compiled blocks


@pytest.mark.parametrize(
    ("chunks", "warm", "compiled_s", "fails", "decided", "tried"),
    [
        (
            100,
            False,
            0.5,
            False,
            False,
            1,
        ),  # a fifth of 100 s is likely to be saved: less than 30 s
        (200, False, 0.5, False, True, 2),
        (200, False, 0.5, True, False, 2),  # blocks that run without it are faster by chance
        (200, False, 1.5, False, False, 2),
        (20, True, 0.5, False, False, 1),
        (30, True, 0.5, False, True, 2),
    ],
)
def test_blocks_are_compiled_if_the_steps_to_come_repay_it(
    tmp_path, monkeypatch, chunks, warm, compiled_s, fails, decided, tried
):
    clock, closed = [0.0], []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_failed", [])
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: clock[0])
    if warm:
        (tmp_path / "fxgraph").mkdir()

    class Timed:
        """An engine whose chunks move the clock, the first compiled one by half a minute more."""

        def __init__(self, compiled: bool) -> None:
            self.seconds = [30.0, compiled_s, compiled_s] if compiled else [2.0, 1.0, 1.0]
            compiling._failed.extend(["RuntimeError"] * (compiled and fails))

        def generate(self, chunk: object) -> list[Any]:
            clock[0] += self.seconds.pop(0)
            return []

        def close(self) -> None:
            closed.append(self)

    assert compiling.repays(Timed, None, chunks)[0] is decided
    assert len(closed) == tried


@pytest.mark.parametrize("further", [(), ("rollout.name=vllm_omni",)])
def test_the_choice_to_compile_is_told_and_written_down(tmp_path, monkeypatch, further):
    config = config_of("rollout.compile=auto", "rollout.micro_batch_size_per_gpu=40", *further)
    sampler, told, tried = prompts_of(config)[0], [], []

    def request(prompts: PromptBatch, seeds: range) -> ImageRequest:
        window = torch.zeros(len(seeds), 1)
        spec = config.rollout.spec()
        n = config.rollout.n
        return ImageRequest(
            prompts=prompts, samples_per_prompt=n, spec=spec, window=window, seeds=seeds
        )

    def repays(engine: object, chunk: ImageRequest, num_chunks: int) -> tuple[bool, str]:
        tried.append((chunk.rows(), chunk.decode, num_chunks))
        return True, "faster"

    monkeypatch.setattr(settle, "repays", repays)
    monkeypatch.setattr(settle, "missing_for_compiling", lambda device: [])
    given = SimpleNamespace(request=request), sampler, pytest.fail, make_processes(config)
    log = SimpleNamespace(console=SimpleNamespace(message=told.append))
    found = settle_compile(config, *given, RunFolder(tmp_path), log, 11)
    assert tried == ([] if further else [(range(40), False, 3 * 180)])
    why = "false (it needs an engine that offers it)" if further else "true (faster)"
    assert told == [f"note: rollout.compile=auto: {why}"]
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["rollout"]["compile"] is found.rollout.compile is (not further)


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_goes_on_keeps_its_blocks_compiled_or_not(tmp_path: Path, kept: bool):
    output = begun(tmp_path, f"rollout.compile={kept}")
    assert settled(config_of(output, "rollout.compile=auto")).rollout.compile is kept
    assert settled(config_of("rollout.compile=auto")).rollout.compile == "auto"

"""Checks that what settings leave open is settled before anything else is looked at."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from support.compositions import checked_config, job, job_spec, resolved, spec_of

from flowgrpo_rc.commands.opening import check_same_rewards
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.records.checkpoint import Checkpoint, save_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.rewards import ocr
from flowgrpo_rc.rollout import devices
from flowgrpo_rc.spec import resolve

RC = "algorithm.rollout_correction"
NO_MEANS = "rollout.name=support.faulty_engines.NoMeans"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu avx512f avx512_bf16", "bf16"),
        ("flags : amx_bf16 amx_tile", "bf16"),
        ("Features : asimd bf16", "bf16"),
        ("flags : fpu avx2", "fp32"),
        (None, "fp32"),  # a system that does not list them
    ],
)
def test_a_cpu_samples_in_bf16_if_it_has_units_for_it(monkeypatch, tmp_path: Path, flags, dtype):
    listing = tmp_path / "cpuinfo"
    if flags is not None:
        listing.write_text(f"model name : some CPU\n{flags}\n")
    monkeypatch.setattr(devices, "CPU_LISTING", listing)
    assert job_spec("rollout.dtype=auto").config.rollout.dtype == dtype
    assert job_spec("rollout.dtype=auto", device="cuda").config.rollout.dtype == "bf16"


def begun(folder: Path, override: str) -> str:
    """Makes the folder of a run with one checkpoint, and returns the override that names it."""
    output = f"trainer.output_dir={folder}"
    run = RunFolder(folder)
    run.create(asdict(job(output, override)), torch.device("cpu"), 1, {})
    state = {"update": {}, "health": {}}
    save_checkpoint(run.checkpoints, Checkpoint(step=1, tensors={}, state=state), keep=1)
    return output


def test_a_run_keeps_the_precision_that_it_began_with(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(resolve, "sampling_dtype", lambda device: pytest.fail("decided again"))
    assert job_spec("rollout.dtype=fp16").config.rollout.dtype == "fp16"
    output = begun(tmp_path, "rollout.dtype=bf16")
    assert job_spec(output, "rollout.dtype=auto").config.rollout.dtype == "bf16"


@pytest.mark.parametrize("found", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("term", ["ocr", "video_ocr"])
def test_the_engine_of_ocr_is_settled_and_a_run_that_goes_on_keeps_it(
    tmp_path: Path, monkeypatch, found: str, term: str
):
    where = None if found == "onnxruntime" else object()
    monkeypatch.setattr(ocr, "find_spec", lambda name: where)

    def engine(*overrides: str) -> str | None:
        others = () if term == "ocr" else ("reward.terms.ocr=null",)
        spec = job_spec(*others, f"reward.terms.{term}.weight=2", *overrides)
        kept = spec.config.reward.terms[term]
        assert kept["weight"] == 2
        return kept.get("engine")

    key = f"reward.terms.{term}.engine"
    assert engine() == found
    assert engine(f"{key}=auto") == found
    assert engine(f"{key}=onnxruntime") == "onnxruntime"
    for kept in ("onnxruntime", "openvino"):
        output = begun(tmp_path / kept, f"{key}={kept}")
        assert engine(output) == kept


def test_machines_that_settle_different_engines_are_told():
    def check(*engines: str) -> None:
        told = [f"reward.terms.ocr.engine={engine}" for engine in engines]
        processes = cast(Processes, SimpleNamespace(gather_objects=lambda mine: mine + told[1:]))
        given = job()
        check_same_rewards(replace(job_spec(told[0]), given=given), processes)

    check("openvino", "openvino")
    with pytest.raises(ValueError, match=r"engine=onnxruntime or reward\.\S+engine=openvino: give"):
        check("openvino", "onnxruntime")


def centered(*overrides: str) -> bool | None:
    return job_spec(*overrides).config.algorithm.rollout_correction.centered


def test_images_are_centered_unless_their_rollout_has_no_means():
    assert job().algorithm.rollout_correction.centered is None
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
    config = resolved(checked_config(compose_config([], config_name="token_grpo"))).config
    assert config.algorithm.rollout_correction.centered is False


def merges(*overrides: str) -> bool | None:
    return job_spec("rollout.merge_lora=null", *overrides).config.rollout.merge_lora


def test_a_lora_is_merged_where_that_loses_nothing():
    assert merges() is True
    assert merges("rollout.dtype=bf16") is True  # fp32 weights are rounded to bf16 anyway
    assert merges("model.dtype=bf16") is False
    assert merges("rollout.quantization=int8") is False
    assert merges("model.quantization=int8") is False
    assert merges("trainer.strategy=fsdp2") is False
    assert merges("rollout.name=vllm_omni") is False


@pytest.mark.parametrize("given", [True, False, "rounded"])
def test_a_given_choice_to_merge_stands(given: bool | str):
    config = job_spec(f"rollout.merge_lora={given}", "rollout.quantization=int8").config
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
    assert spec_of(*overrides).settings.actor.diffusion_loss.clip_ratio == clip

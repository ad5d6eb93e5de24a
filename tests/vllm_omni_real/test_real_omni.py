"""VllmOmniEngine on the real vLLM-Omni, on a CPU: `make test-vllm-omni`.

Skipped unless vLLM-Omni is installed. The oracles are the stock diffusers pipelines, the diffusers
engine, and `FlowPolicy`, with which the trainer computes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import read_rows, without_timings
from support.tiny_models import TINY, Tiny, wan
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.core.random import derive_seed, normal
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import EngineError, ImageRequest, RolloutChunk, RolloutEngine
from flowgrpo_rc.rollout.vllm_omni.lora import fingerprint, weights_to_bind
from flowgrpo_rc.rollout.vllm_omni_engine import PIPELINES, VllmOmniEngine

if find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni is not installed", allow_module_level=True)

TEXTS = ('"AB7X"', 'an "HI"', '"K9Q"')  # of different lengths, so that Qwen-Image's masks count
STEPS = 4
SIZE = {"height": 32, "width": 64}
CONFIG = ModelConfig(lora_rank=4, lora_alpha=8)
TIMES = {"timeout_s": 120.0, "start_timeout_s": 300.0}
# vLLM-Omni divides the positions of Wan's heads right if their width is 0, 1 or 2 more than a
# multiple of 6, as the published 128 is.
CHECKPOINTS = {**TINY, "WanPipeline": replace(TINY["WanPipeline"], build=partial(wan, head_width=18))}
SAME = 1e-5  # latents that differ by less are the same up to rounding


@dataclass
class Case:
    """One family: the trainer's model with its LoRA, the engine, and the diffusers engine in the
    same precision.
    """

    tiny: Tiny
    model: FlowModel
    engine: VllmOmniEngine
    diffusers: DiffusersEngine

    def push(self, version: int) -> None:
        """Gives a LoRA for each version to the trainer and both engines; version 0 has no
        effect.
        """
        state = lora(self.model, version)
        for name, parameter in lora_parameters(self.model.network).items():
            parameter.data.copy_(state[name])
        for engine in (self.engine, self.diffusers):
            engine.sync_weights(state, version)


def lora(model: FlowModel, version: int) -> dict[str, Tensor]:
    scale = 0.05 if version else 0.0
    return {
        n: scale * normal(p.shape, [version], n)[0]
        for n, p in lora_parameters(model.network).items()
    }


def open_case(family: str, folder: Path, dtype: str) -> Iterator[Case]:
    tiny = CHECKPOINTS[family]
    tiny.save(folder)
    model = load_model(replace(CONFIG, path=str(folder)), torch.device("cpu"))
    network = add_lora(model, CONFIG, seed=0)
    engine = VllmOmniEngine(model, network, dtype=dtype, chunk_size=4, **TIMES)
    case = Case(tiny, model, engine, DiffusersEngine(model, network, dtype=dtype, chunk_size=4))
    case.push(1)
    yield case
    engine.close()


@pytest.fixture(scope="module", params=PIPELINES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    yield from open_case(request.param, tmp_path_factory.mktemp(request.param), "fp32")


@pytest.fixture(scope="module", params=PIPELINES)
def bf16(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    yield from open_case(request.param, tmp_path_factory.mktemp(request.param), "bf16")


def request_of(
    spec: SamplerSpec, seeds: Sequence[int], window: Sequence[int], texts: Sequence[str] = TEXTS
) -> ImageRequest:
    return ImageRequest(
        prompts=PromptBatch(
            step=1,
            prompts=[
                Prompt(text=text, index=i, negative_text="blur") for i, text in enumerate(texts)
            ],
            slots=range(len(texts)),
        ),
        samples_per_prompt=len(seeds) // len(texts),
        spec=spec,
        seeds=seeds,
        window=torch.tensor(window).expand(len(seeds), len(window)),
        keep_means=True,
    )


SEEDS = [derive_seed(0, row) for row in range(6)]
WINDOW = (0, 1)  # the third of four steps ends at sigma 0.001, where cps has next to no noise


def sample(
    engine: RolloutEngine[ImageRequest], request: ImageRequest
) -> tuple[DiffusionBatch, list[RolloutChunk]]:
    chunks = list(engine.generate(request))
    return concat([chunk.batch for chunk in chunks]), chunks


def mismatch(case: Case, batch: DiffusionBatch) -> Tensor:
    """Returns |trainer's log-probs - engine's| [B, T]."""
    with torch.no_grad():
        return (
            FlowPolicy(case.model, case.model.network).log_probs(batch, 4) - batch.rollout_log_probs
        ).abs()


@pytest.mark.parametrize("guidance", ["unguided", "guided"])
def test_images_are_those_of_the_stock_pipeline(case: Case, guidance: str) -> None:
    scales = vars(case.tiny)[guidance]
    spec = case.tiny.spec("sde", scales, noise_level=0.0)
    seeds = SEEDS[:3]
    batch, (chunk,) = sample(case.engine, request_of(spec, seeds, range(STEPS)))
    latents = normal(case.model.latent_shape(spec), seeds, "latents")
    settings = stock_settings(case, spec, scales, guidance == "guided")
    wanted = case.model.pipeline(latents=latents, output_type="latent", **settings)[0]
    images = case.model.pipeline(latents=latents, output_type="np", **settings)[0]
    found = case.tiny.stock_latents(case.model, batch.all_latents[:, -1])
    difference = (found - wanted).abs().max().item()
    print(
        f"{case.model.pipeline_class} {guidance}: latents differ by {difference:.1e} from the "
        "stock pipeline's"
    )
    assert difference < SAME
    assert abs(chunk.samples / 255 - images).max() <= 0.5 / 255 + 1e-5


def stock_settings(
    case: Case, spec: SamplerSpec, scales: Mapping[str, float], guided: bool
) -> dict[str, Any]:
    """Returns what the stock pipeline is called with, besides latents and kind of output."""
    pipeline = case.model.pipeline
    settings: dict[str, Any] = {
        "prompt": list(TEXTS),
        "num_inference_steps": STEPS,
        "max_sequence_length": spec.max_sequence_length,
        "return_dict": False,
        **SIZE,
        **scales,
    }
    if spec.num_frames is not None:
        settings["num_frames"] = spec.num_frames
    negative = ["blur"] * len(TEXTS)
    if "negative_prompt" in signature(pipeline.__call__).parameters:
        settings["negative_prompt"] = negative
    elif guided:
        embeds, _ = pipeline.encode_prompt(negative, max_sequence_length=spec.max_sequence_length)
        settings["negative_prompt_embeds"] = embeds
    return settings


@pytest.mark.parametrize("guidance", ["unguided", "guided"])
@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_batch_is_that_of_the_diffusers_engine(case: Case, kind: str, guidance: str) -> None:
    request = request_of(case.tiny.spec(kind, vars(case.tiny)[guidance]), SEEDS, WINDOW)
    found, chunks = sample(case.engine, request)
    expected, others = sample(case.diffusers, request)
    assert (
        [len(chunk.batch) for chunk in chunks] == [len(chunk.batch) for chunk in others] == [4, 2]
    )
    for field in dataclasses.fields(DiffusionBatch):
        mine = getattr(found, field.name)
        theirs = getattr(expected, field.name)
        if field.name == "prev_sample_mean":
            mean = mine
        elif isinstance(theirs, Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
            assert (
                mine.equal(theirs)
                if not mine.is_floating_point()
                else (mine - theirs).abs().max() < SAME
            ), field.name
        elif field.name in ("conditioning", "negative") and theirs is not None:
            for name in ("embeds", "pooled", "mask"):
                mine_part = getattr(mine, name)
                their_part = getattr(theirs, name)
                assert (mine_part is None) == (their_part is None), (field.name, name)
                assert (
                    their_part is None
                    or (mine_part.float() - their_part.float()).abs().max() < SAME
                )
        else:
            assert mine == theirs, field.name
    policy = FlowPolicy(case.model, case.model.network)
    assert (policy.transition(found.step(1)).mean - mean[:, 1]).abs().max() < SAME
    for chunk, other in zip(chunks, others, strict=True):
        assert abs(chunk.samples.astype(int) - other.samples).max() <= 1
        assert chunk.prompts == other.prompts
    assert found.spec == replace(request.spec, dtype="fp32")


@pytest.mark.parametrize("guidance", ["unguided", "guided"])
@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_log_probs_are_those_of_the_trainer(case: Case, kind: str, guidance: str) -> None:
    batch, _ = sample(
        case.engine, request_of(case.tiny.spec(kind, vars(case.tiny)[guidance]), SEEDS, WINDOW)
    )
    worst = mismatch(case, batch).max().item()
    print(
        f"{case.model.pipeline_class} fp32 {kind} {guidance}: log-probs differ by at most "
        f"{worst:.1e}"
    )
    assert worst < 1e-6


def test_a_sample_follows_its_seed_and_not_its_batch(case: Case) -> None:
    spec = case.tiny.spec("sde", case.tiny.unguided)
    text = TEXTS[:1]
    together, _ = sample(case.engine, request_of(spec, SEEDS[:4], WINDOW, text))
    again, _ = sample(case.engine, request_of(spec, SEEDS[:4], WINDOW, text))
    backwards, _ = sample(case.engine, request_of(spec, SEEDS[:4][::-1], WINDOW, text))
    alone = [sample(case.engine, request_of(spec, [seed], WINDOW, text))[0] for seed in SEEDS[:4]]
    assert torch.equal(together.all_latents, again.all_latents)
    assert torch.equal(together.rollout_log_probs, again.rollout_log_probs)
    for other in (concat(alone), backwards.select(torch.tensor([3, 2, 1, 0]))):
        assert (together.all_latents - other.all_latents).abs().max() < SAME
        assert (together.rollout_log_probs - other.rollout_log_probs).abs().max() < 1e-6
    assert (together.all_latents[0] - together.all_latents[1]).abs().max() > 0.1


def test_a_pushed_lora_is_that_of_peft(case: Case) -> None:
    request = request_of(case.tiny.spec("sde", case.tiny.guided), SEEDS, WINDOW)
    latents = {}
    for version in (0, 2, 3):
        case.push(version)
        found, _ = sample(case.engine, request)
        expected, _ = sample(case.diffusers, request)
        assert (found.all_latents - expected.all_latents).abs().max() < SAME
        assert set(found.policy_version.tolist()) == {version}
        latents[version] = found.all_latents
    assert (latents[0] - latents[2]).abs().max() > 10 * SAME
    assert (latents[3] - latents[2]).abs().max() > 10 * SAME
    case.push(1)


def test_the_child_has_vllm_and_the_trainer_its_process_group(case: Case) -> None:
    assert not {"vllm", "vllm_omni"} & sys.modules.keys()
    environment = (
        Path(f"/proc/{case.engine._process.pid}/environ").read_bytes().decode().split("\0")
    )
    assert not [
        entry
        for entry in environment
        if entry.startswith(("RANK=", "WORLD_SIZE=", "MASTER_", "LOCAL_RANK="))
    ]
    assert os.getpgid(case.engine._process.pid) != os.getpgid(0)


def test_a_stale_lora_is_caught(case: Case) -> None:
    """The engine ends with the error, so this is the last test of `case`."""
    request = request_of(case.tiny.spec("sde", case.tiny.unguided), SEEDS[:3], WINDOW)
    stale = lora(case.model, 5)
    tensors = weights_to_bind(stale, adapter="default", scale=2.0, dtype=torch.float32)
    (reply,) = case.engine._process.ask("sync", {"version": 5, "rank": CONFIG.lora_rank}, tensors)
    assert reply.fields == {"modules": len(stale) // 2, "fingerprint": fingerprint(tensors)}
    with pytest.raises(
        EngineError, match=r"does not hold the LoRA of step 1: it bound (\d+) of \1 modules"
    ):
        sample(case.engine, request)
    assert not Path(f"/proc/{case.engine._process.pid}").exists()


def test_bf16_shows_its_gap(bf16: Case) -> None:
    for guidance in ("unguided", "guided"):
        batch, _ = sample(
            bf16.engine,
            request_of(
                bf16.tiny.spec("sde", vars(bf16.tiny)[guidance], dtype="bf16"), SEEDS, WINDOW
            ),
        )
        gap = mismatch(bf16, batch)
        print(
            f"{bf16.model.pipeline_class} bf16 {guidance}: |difference| mean {gap.mean():.1e}, max "
            f"{gap.max():.1e}"
        )
        assert batch.spec.dtype == "bf16"
        assert batch.all_latents.dtype == torch.float32
        assert 1e-5 < gap.mean() < 1e-2


def test_a_lora_that_binds_nothing_is_an_error(bf16: Case) -> None:
    """It ends the engine, as every error does; the next engine may be started in its place."""
    elsewhere = {
        f"vision.{name}": tensor.bfloat16() for name, tensor in lora(bf16.model, 2).items()
    }
    tensors = {name.replace(".default.", "."): tensor for name, tensor in elsewhere.items()}
    with pytest.raises(EngineError, match=r"failed in 'sync': .*binding is incomplete: bound=0/"):
        list(bf16.engine._process.ask("sync", {"version": 2, "rank": CONFIG.lora_rank}, tensors))


# --- Whole runs of the training command on the bundled model


def documented_commands() -> list[list[str]]:
    """Returns the overrides of the documented training commands for vLLM-Omni, without their
    output folder.
    """
    text = (Path(__file__).parents[2] / "docs" / "vllm_omni.md").read_text().replace("\\\n", " ")
    start = ".venv-vllm-omni/bin/flowgrpo-rc train "
    lines = [
        line.removeprefix(start).split() for line in text.splitlines() if line.startswith(start)
    ]
    return [[part for part in line if not part.startswith("trainer.output_dir=")] for line in lines]


BYPASS, DECOUPLED = documented_commands()
SMALL = (
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=8",
    "rollout.val_kwargs.n=16",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.save_freq=2",
    "trainer.device=cpu",
)


def command(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> list[str]:
    return [
        sys.executable,
        *launcher,
        "-m",
        "flowgrpo_rc.train",
        *overrides,
        *SMALL,
        f"trainer.output_dir={folder}",
    ]


def train(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> list[dict[str, Any]]:
    subprocess.run(command(folder, *overrides, launcher=launcher), check=True, timeout=1800)
    return read_rows(folder)


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


@pytest.fixture(scope="module")
def diffusers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "diffusers"
    train(folder, *DECOUPLED, "rollout.name=diffusers")
    return folder


def engine_of(trainer: int) -> int:
    """Returns the child of a trainer's process that has a session of its own: the engine."""
    tasks = Path(f"/proc/{trainer}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    (engine,) = [child for child in children if os.getsid(child) == child]
    return engine


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_decoupled_training_survives_the_death_of_its_engine(
    diffusers_run: Path, tmp_path: Path, max_restarts: int
) -> None:
    """The engine is killed after the fifth step.

    It is started again and the run goes on, or the run fails with a report and the same command
    goes on to the tenth.
    """
    folder = tmp_path / "run"
    words = [*DECOUPLED, f"+rollout.engine_kwargs.max_restarts={max_restarts}"]
    with subprocess.Popen(command(folder, *words), stderr=subprocess.PIPE, text=True) as trainer:
        try:
            while not (folder / "metrics.jsonl").exists() or len(read_rows(folder)) < 6:
                assert trainer.poll() is None, "the run ended before the fifth step"
                time.sleep(0.1)
            os.kill(engine_of(trainer.pid), signal.SIGKILL)
            began = time.monotonic()
            _, errors = trainer.communicate(timeout=600)
        finally:
            trainer.kill()
    print(f"ended {time.monotonic() - began:.1f} s after kill -9")
    assert "signal SIGKILL ended it" in errors or "it is started again" in errors
    if max_restarts:
        assert trainer.returncode == 0, errors
        assert "it is started again (engine_kwargs.max_restarts allows 0 more)" in errors
    else:
        assert trainer.returncode == 1
        assert "error: the vLLM-Omni engine" in errors
    rows = read_rows(folder) if max_restarts else train(folder, *words)
    expected = read_rows(diffusers_run)
    assert [row["step"] for row in rows] == list(range(11))
    assert [set(row) for row in without_timings(rows)] == [
        set(row) for row in without_timings(expected)
    ]
    gaps = [row["rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]]
    print(f"fp32 engine: mean |difference| of log-probs {max(gaps):.1e}")
    assert max(gaps) < 1e-6
    for row, other in zip(rows[:3], expected[:3], strict=True):
        for name in ("reward/mean", "val/reward", "advantages/std"):
            assert row.get(name) == pytest.approx(other.get(name), abs=0.02), (row["step"], name)
    assert (folder / "report.html").stat().st_size > 10_000
    mine = exported(folder)
    theirs = exported(diffusers_run)
    assert mine.keys() == theirs.keys()
    distance = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    print(f"LoRA after ten steps: {distance:.1e} from that of the diffusers engine")
    assert distance < 1e-3


def test_bypass_training_shows_the_mismatch_of_a_bf16_engine(
    diffusers_run: Path, tmp_path: Path
) -> None:
    rows = train(tmp_path / "run", *BYPASS)
    assert [row["step"] for row in rows] == list(range(11))
    gaps = [row["actor/rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]]
    print(f"bf16 engine: mean |difference| of log-probs {min(gaps):.1e} to {max(gaps):.1e}")
    assert all(1e-5 < gap < 1e-2 for gap in gaps)
    assert rows[0]["val/reward"] == pytest.approx(read_rows(diffusers_run)[0]["val/reward"])
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_two_ranks_have_an_engine_each(diffusers_run: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    rows = train(
        tmp_path / "run",
        *DECOUPLED,
        "trainer.total_training_steps=2",
        launcher=launcher,
    )
    expected = read_rows(diffusers_run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["reward/mean"] == pytest.approx(expected[1]["reward/mean"], abs=0.02)
    assert max(row["rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]) < 1e-6

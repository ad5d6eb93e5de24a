"""What the running trainer notices of an engine with a fault, on the bundled model, within one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from faulty_engine import FAULTS
from torch import Tensor

from flowgrpo_rc.compose import compose_config, to_config
from flowgrpo_rc.config import Config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.run import make_floor, make_source, make_task
from flowgrpo_rc.training.health import HealthMonitor
from flowgrpo_rc.training.image_task import ImageTask
from flowgrpo_rc.training.lora import lora_parameters
from flowgrpo_rc.training.processes import Processes
from flowgrpo_rc.training.source import EngineSource

SETTINGS = [
    *("data.train_batch_size=3", "rollout.n=4", "rollout.micro_batch_size_per_gpu=12", "reward.terms.ocr=null"),
    *("actor.ppo_mini_batch_size=3", "actor.ppo_micro_batch_size_per_gpu=12", "reward.terms.jpeg.weight=1"),
    *("rollout.pipeline.guidance_scale=4.5", "rollout.name=faulty_engine.FaultyEngine", "trainer.device=cpu"),
]
ALARM = "differ by more than their precisions explain"


@dataclass(frozen=True)
class Bench:
    """A model whose LoRA takes part, and its values one update earlier."""

    task: ImageTask
    processes: Processes
    earlier: dict[str, Tensor]
    now: dict[str, Tensor]


@pytest.fixture(scope="module")
def bench() -> Bench:
    processes = Processes(Accelerator(cpu=True))
    task = make_task(configure(), processes)
    assert isinstance(task, ImageTask)
    source, earlier, now = torch.Generator().manual_seed(1), {}, {}
    for name, parameter in lora_parameters(task.model.network).items():
        drawn = torch.randn(parameter.shape, generator=source)
        earlier[name] = (0.02 * drawn if "lora_B" in name else parameter.detach()).clone()
        now[name] = earlier[name] + 1e-3 * torch.randn(parameter.shape, generator=source).sign()  # Adam's step
        parameter.data.copy_(now[name])
    return Bench(task, processes, earlier, now)


def configure(*further: str) -> Config:
    return to_config(compose_config([*SETTINGS, *further]))


@dataclass(frozen=True)
class Seen:
    """What an iteration said: the size of the mismatch, in log-probs and over the expectation, and the alarms."""

    size: float
    over: float
    alarms: list[str]


def iterate(bench: Bench, *further: str) -> Seen:
    """Step 2: the engine got the earlier weights, then those of the training graph."""
    config = configure(*further)
    task = ImageTask(bench.task.model, bench.task.policy, config.rollout, seed=0)
    rewards, floor = RewardManager(config.reward), make_floor(config, task, bench.processes)
    source = make_source(config, task, config.read_prompts()[0], rewards, bench.processes, first_step=0)
    assert isinstance(source, EngineSource)
    try:
        source.sync_weights(bench.earlier, 0)
        source.sync_weights(bench.now, 1)
        batch = source.collect(2).batch
    finally:
        rewards.close()
        source.close()
    bag = MetricBag()
    bag.merge(task.observe(batch))
    floor.expect(batch, 2)
    floor.before(batch, task.policy.log_probs(batch, 12))
    bag.merge(floor.finish(), "rollout_corr")
    row = bag.compute()
    alarms = HealthMonitor(config.effective_correction()).update(2, row)
    return Seen(row["rollout_corr/logprob_abs_diff_mean"], row["rollout_corr/mismatch_over_expected"], alarms)


def fault(name: str, **options: Any) -> list[str]:
    return [f"+rollout.engine_kwargs.{key}={value}" for key, value in {"fault": name, **options}.items()]


@pytest.fixture(scope="module")
def floor_of_bf16(bench: Bench) -> float:
    return iterate(bench, "rollout.dtype=bf16").size


CLEAN = {
    "fp32": ["rollout.dtype=fp32"],
    "other_shape": ["rollout.dtype=fp32", "rollout.micro_batch_size_per_gpu=4"],
    "fp16": ["rollout.dtype=fp16"],
    "bf16": ["rollout.dtype=bf16"],
    "int8_dynamic": ["rollout.dtype=fp32", "rollout.quantization=int8_dynamic"],
    "no_guidance": ["rollout.dtype=bf16", "rollout.pipeline.guidance_scale=1.0"],
    "cps": ["rollout.dtype=bf16", "rollout.algo.sde_type=cps", "rollout.algo.log_prob_convention=peers"],
}


@pytest.mark.parametrize("pair", CLEAN)
def test_a_clean_engine_raises_no_alarm(bench: Bench, pair: str) -> None:
    seen = iterate(bench, *CLEAN[pair])
    assert seen.alarms == []
    assert seen.over < (0.5 if pair in ("fp32", "other_shape") else 1.8)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_an_fp32_pair_is_noticed(bench: Bench, floor_of_bf16: float, name: str) -> None:
    """And with a bf16 rollout each that is above three times its floor."""
    seen = iterate(bench, "rollout.dtype=fp32", *fault(name))
    assert any(ALARM in alarm and "flowgrpo-rc calibrate" in alarm for alarm in seen.alarms)
    in_bf16 = iterate(bench, "rollout.dtype=bf16", *fault(name))
    print(name, seen.size, seen.over, floor_of_bf16, in_bf16.size, in_bf16.over)
    if seen.size > 3 * floor_of_bf16:
        assert any(ALARM in alarm for alarm in in_bf16.alarms)


def test_latents_in_16_bits_are_noticed_below_the_floor(bench: Bench) -> None:
    (alarm,) = iterate(bench, "rollout.dtype=bf16", *fault("bf16_latents")).alarms
    assert "stores latents in 16 bits" in alarm


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guidance", "guidance_scale: 4.5 here, 4.545"),
        ("shifted_schedule", "another schedule than the model's: sigmas"),
        ("stale_weights", "does not hold the trainer's LoRA"),
    ],
)
def test_what_an_engine_admits_is_compared(bench: Bench, name: str, words: str) -> None:
    """Below any floor, by the echoed settings, the recorded schedule and the weights that it holds."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        iterate(bench, "rollout.dtype=bf16", *fault(name, admits=True))
    assert words in str(error.value)


def test_a_resumed_run_expects_the_same(bench: Bench, tmp_path: Path) -> None:
    config = configure("rollout.dtype=bf16")
    first, second = (make_floor(config, bench.task, bench.processes) for _ in range(2))
    task = ImageTask(bench.task.model, bench.task.policy, config.rollout, seed=0)
    rewards = RewardManager(config.reward)
    source = make_source(config, task, config.read_prompts()[0], rewards, bench.processes, first_step=0)
    source.sync_weights(bench.now, 0)
    batch = source.collect(1).batch
    rewards.close()
    source.close()
    first.expect(batch, 1)
    second.load(first.tensors())
    second.expect(batch, 2)  # not due: it would read the batch otherwise
    assert torch.equal(first.tensors()["autocast"], second.tensors()["autocast"])

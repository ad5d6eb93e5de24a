"""An engine with a fault is noticed in one iteration of the bundled model.

The iteration consists of the parts that judge a rollout, as a run assembles them: source, task,
mismatch monitor and health rules. There is no update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support import faulty_engines as faulty
from support.compositions import checked_config, resolved
from support.kernels import needs_int8_kernels
from support.marks import slow, slow_but
from support.torchao import needs_torchao
from torch import Tensor

from flowgrpo_rc.assembly.algorithm import make_monitor
from flowgrpo_rc.assembly.run import make_health
from flowgrpo_rc.assembly.source import make_source
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk
from flowgrpo_rc.spec.check_inputs import prompts_of
from flowgrpo_rc.training.sources.source import Collected, RolloutSource
from flowgrpo_rc.training.tasks.image import ImageTask

SETTINGS = [
    "data.train_batch_size=3",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=12",
    "rollout.pipeline.guidance_scale=4.5",
    "actor.ppo_mini_batch_size=3",
    "actor.ppo_micro_batch_size_per_gpu=12",
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1",
    "trainer.device=cpu",
]
FP32 = "rollout.dtype=fp32"
BF16 = "rollout.dtype=bf16"


class Silent(DiffusersEngine):
    """Does not show the trainer its weights, as an engine in a process of its own."""

    def held_weights(self) -> None:  # type: ignore[override]
        return None


class SilentStale(Silent, faulty.StaleWeights):
    """Holds stale weights."""


class SilentUnboundLora(Silent, faulty.UnboundLora):
    """Binds no LoRA."""


class ThreeFloors(faulty.Recorded):
    """A fault of any kind, 3.2 times as large as `floor`, the mismatch of a bf16 rollout."""

    floor = 0.0

    def record(self, batch: DiffusionBatch) -> DiffusionBatch:
        source = torch.Generator().manual_seed(0)
        drawn = torch.randn(batch.rollout_log_probs.shape, generator=source)
        size = 3.2 * self.floor * drawn / drawn.abs().mean()
        return batch.replace(rollout_log_probs=batch.rollout_log_probs + size)


class TellsGuidance(faulty.Guidance):
    """Its batches tell the guidance that it used."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        return DiffusersEngine.generate(self, self.changed(request))


FAULTS = (
    faulty.Bf16Timestep,
    faulty.Guidance,
    faulty.Shift,
    SilentStale,
    SilentUnboundLora,
)


def engine(cls: type[DiffusersEngine]) -> str:
    return f"rollout.name={cls.__module__}.{cls.__name__}"


class Bench:
    """The bundled model with a LoRA that takes part, and its values before and after an update."""

    def __init__(self, *settings: str) -> None:
        self.settings = settings
        task = make_task(resolved(configure(*settings)), Processes(Accelerator(cpu=True)))
        assert isinstance(task, ImageTask)
        self.model = task.model
        source = torch.Generator().manual_seed(1)
        self.earlier: dict[str, Tensor] = {}
        self.now: dict[str, Tensor] = {}
        for name, parameter in lora_parameters(self.model.network).items():
            drawn = torch.randn(parameter.shape, generator=source)
            self.earlier[name] = (0.02 * drawn if "lora_B" in name else parameter.detach()).clone()
            step = 1e-3 * torch.randn(parameter.shape, generator=source).sign()  # Adam's first one
            self.now[name] = self.earlier[name] + step
            parameter.data.copy_(self.now[name])

    @contextmanager
    def assembled(
        self, config: Config
    ) -> Iterator[tuple[ImageTask, MismatchMonitor, RolloutSource]]:
        """Makes the task, the mismatch monitor and the source of a run."""
        spec = resolved(config)
        config = spec.config
        processes = Processes(Accelerator(cpu=True))
        policy = FlowPolicy(self.model, self.model.network, autocast=processes.accelerator.autocast)
        task = ImageTask(
            self.model,
            policy,
            config.rollout,
            seed=0,
            keep_means=spec.keeps_means,
            seeded=spec.engine_class.draws_seed_noise,
        )
        rewards = RewardManager(config.reward, spec.rewards)
        source = make_source(spec, task, prompts_of(spec)[0], rewards, processes, first_step=0)
        try:
            yield task, make_monitor(spec, task, processes), source
        finally:
            rewards.close()
            source.close()

    def parts(self, config: Config) -> tuple[ImageTask, MismatchMonitor, Collected]:
        """Returns the task, the mismatch monitor and the samples of step 2.

        The engine got the earlier weights, then those of the training graph.
        """
        with self.assembled(config) as (task, monitor, source):
            source.sync_weights(self.earlier, 0)
            source.sync_weights(self.now, 1)
            return task, monitor, source.collect(2)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def configure(*further: str) -> Config:
    return checked_config(compose_config([*SETTINGS, *further]))


@dataclass(frozen=True)
class Seen:
    """What an iteration said: the size of the mismatch, in log-probs and relative to the
    expectation, the alarms, and the metrics of the rollout.
    """

    size: float
    over: float
    alarms: list[str]
    rollout: dict[str, float]

    @property
    def noticed(self) -> bool:
        """Returns whether an alarm says that the mismatch is too large."""
        return any("differ by more than their precisions explain" in text for text in self.alarms)


def iterate(bench: Bench, *further: str) -> Seen:
    config = configure(*bench.settings, *further)
    task, monitor, collected = bench.parts(config)
    # As in the first step, in which prompts are encoded again.
    row = measured(task, monitor, collected, 1)
    return Seen(
        row["rollout_corr/logprob_abs_diff_mean"],
        row["rollout_corr/mismatch_over_expected"],
        make_health(resolved(config)).update(2, row),
        {name: value for name, value in row.items() if name.startswith("rollout/")},
    )


def measured(
    task: ImageTask, monitor: MismatchMonitor, collected: Collected, step: int
) -> dict[str, float]:
    """Returns the metrics of an iteration without an update."""
    batch = collected.batch
    assert isinstance(batch, DiffusionBatch)
    bag = MetricBag()
    bag.merge(task.observe(batch, collected.shown, step))
    monitor.expect(batch, step)
    monitor.before_update(batch, task.policy.log_probs(batch, 12))
    bag.merge(monitor.finish(recomputes=True), "rollout_corr")
    return bag.compute()


@pytest.fixture(scope="module")
def floor_of_bf16(bench: Bench) -> float:
    return iterate(bench, BF16).size


INT8 = "rollout.quantization=int8_dynamic"
PEERS = "rollout.algo.log_prob_convention=peers"


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ([FP32], 0.5),
        ([BF16], 1.8),
        slow([FP32, "rollout.micro_batch_size_per_gpu=4"], 0.5),
        slow(["rollout.dtype=fp16"], 1.8),
        pytest.param([FP32, INT8], 1.8, marks=[needs_int8_kernels, pytest.mark.slow]),
        slow([BF16, "rollout.algo.sde_type=cps", PEERS], 1.8),
    ],
)
def test_a_clean_engine_raises_no_alarm(bench: Bench, settings: list[str], most: float) -> None:
    seen = iterate(bench, *settings)
    assert seen.alarms == []
    assert seen.over < most


@pytest.mark.parametrize("cls", slow_but([SilentStale], FAULTS))
def test_every_fault_of_an_fp32_pair_is_noticed(
    bench: Bench, floor_of_bf16: float, cls: type[DiffusersEngine]
) -> None:
    """With a bf16 rollout, every fault above three times its mismatch is noticed as well."""
    seen = iterate(bench, FP32, engine(cls))
    assert seen.noticed
    large = seen.size > 3 * floor_of_bf16
    assert large or cls is not faulty.Shift
    assert not large or iterate(bench, BF16, engine(cls)).noticed


@pytest.mark.slow
@pytest.mark.kernels
def test_three_floors_are_noticed_in_a_bf16_pair(
    bench: Bench, floor_of_bf16: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreeFloors, "floor", floor_of_bf16)
    assert iterate(bench, BF16, engine(ThreeFloors)).noticed


# --- Training in bf16


@pytest.fixture(scope="module")
def in_bf16() -> Bench:
    return Bench("model.dtype=bf16")


@pytest.fixture(scope="module")
def other_kernels(in_bf16: Bench) -> Seen:
    """What an engine said that multiplies the same weights in bf16 in another way."""
    return iterate(in_bf16, BF16, engine(faulty.OtherKernels))


@pytest.mark.slow
@pytest.mark.kernels
def test_roundings_of_other_kernels_are_expected(in_bf16: Bench, other_kernels: Seen) -> None:
    assert other_kernels.alarms == []
    assert 0.5 < other_kernels.over < 1.8
    seen = iterate(in_bf16, BF16)  # equal roundings
    assert (seen.over, seen.alarms) == (0, [])


@pytest.mark.slow
def test_latents_in_16_bits_are_noticed_below_the_floor(bench: Bench) -> None:
    (alarm,) = iterate(bench, BF16, engine(faulty.Bf16Latents)).alarms
    assert "stores latents in 16 bits" in alarm


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (TellsGuidance, "guidance_scale: 4.5 here, 4.545"),
        slow(faulty.NoNegative, "recorded no negative prompts"),
        (faulty.StaleWeights, "does not hold the trainer's LoRA of step 1"),
        slow(faulty.UnboundLora, "62 of 62 tensors are missing or others"),
    ],
)
def test_what_an_engine_tells_is_compared(
    bench: Bench, cls: type[DiffusersEngine], words: str
) -> None:
    """Echoed settings, recorded schedule and held weights say it, however small the fault is."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        iterate(bench, BF16, engine(cls))
    assert words in str(error.value)


# --- Noise, with and without the rollout's means

MEANS = {
    "without_means": [],
    "with_means": [
        "algorithm.rollout_correction.rollout_rs=step_kl",
        "algorithm.rollout_correction.rollout_rs_threshold=auto:4",
    ],
}
SHARING = "same noise for several samples or steps"
NOISES = {
    faulty.SharedNoise: SHARING,
    faulty.SameNoise: SHARING,
    faulty.NeighboursNoise: SHARING,
    faulty.LoudNoise: "noise of another size",
    faulty.NotTheSeeds: "says that it draws the noise of the samples' seeds",
}


@pytest.mark.parametrize(
    ("cls", "means"), [slow(*case) for case in zip(NOISES, 3 * list(MEANS), strict=False)]
)
def test_wrong_noise_is_noticed(bench: Bench, cls: type[DiffusersEngine], means: str) -> None:
    """It makes no mismatch: each log-prob is that of the state that was drawn."""
    few = "rollout.micro_batch_size_per_gpu=2"
    seen = iterate(bench, FP32, few, engine(cls), *MEANS[means])
    assert any(NOISES[cls] in alarm for alarm in seen.alarms)
    assert not seen.noticed


@pytest.mark.slow
def test_independent_noise_of_other_seeds_is_no_fault(bench: Bench) -> None:
    seen = iterate(bench, BF16, engine(faulty.OwnNoise), *MEANS["with_means"])
    assert seen.alarms == []
    assert seen.rollout["rollout/noise_variance_off"] == 0
    assert seen.rollout["rollout/noise_shared_max"] < 0.25


# --- Prompts

ODD = "  a\\n tall   cat "  # as JSON has it


@pytest.mark.slow
def test_changed_prompts_and_a_dropped_shift_are_noticed(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """A model whose tokenizer sees whitespace, and prompts with much of it."""
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{ODD}{n}\\\\n"}}\n' for n in range(8)))
    odd = Bench(
        f"model.path={saved('QwenImagePipeline')}",
        "model.lora_rank=4",
        "model.lora_alpha=8",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "rollout.pipeline.guidance_scale=1.0",
        "rollout.pipeline.true_cfg_scale=4.0",
        FP32,
    )
    seen = iterate(odd)
    assert (seen.alarms, seen.rollout["rollout/conditioning_error_max"]) == ([], 0)
    assert iterate(odd, engine(faulty.Collapsed)).noticed
    assert iterate(odd, engine(faulty.NoShift)).noticed
    # The training graph is given what the engine encoded, so that there is no mismatch.
    seen = iterate(odd, engine(faulty.TellsCollapsed))
    assert seen.over < 0.5
    (alarm,) = seen.alarms
    assert "encodes other prompts than it is given" in alarm


# --- Quantization


@pytest.mark.slow
@pytest.mark.kernels
@needs_torchao
def test_a_quantization_that_is_not_applied_is_noticed(bench: Bench) -> None:
    int4 = (BF16, "rollout.quantization=int4")
    clean = iterate(bench, *int4)
    assert clean.alarms == []
    assert 0.5 < clean.over < 1.8
    (alarm,) = iterate(bench, *int4, engine(faulty.HiddenPlainWeights)).alarms
    assert "The engine seems to sample with plain weights" in alarm
    with pytest.raises(RuntimeError, match="does not quantize"):
        iterate(bench, *int4, engine(faulty.PlainWeights))

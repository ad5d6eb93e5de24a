"""The mismatch before the first update, and the policy's own movement after it.

Numbers are compared with numpy and formulas, and over processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.builders import diffusion_batch, loss_config, token_batch
from support.costs import transfers
from support.decisions import normal as differences
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import Batch, DiffusionBatch, SamplerSpec
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.monitoring.mismatch import (
    MismatchMonitor,
    drift,
    quantile,
    round_up,
    spread,
)
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate


class Others(Processes):
    """The first of several processes; the others brought `values` and `sums`."""

    def __init__(self, values: Tensor, sums: Tensor) -> None:
        super().__init__(Accelerator(cpu=True))
        self._values = values
        self._sums = sums

    def gather_ragged(self, values: Tensor) -> Tensor:
        return torch.cat([values, self._values])

    def sum(self, value: Tensor) -> Tensor:
        return value + self._sums


class EvenSchedule:
    """Gives a policy what it asks of its model here: sigmas in even steps from 1 to 0."""

    networks = ("transformer",)

    def schedule(self, spec: SamplerSpec) -> Schedule:
        sigmas = torch.linspace(1, 0, spec.num_inference_steps + 1)
        return Schedule(sigmas, sigmas[:-1] * 1000)


def floor_of(
    policy: type[Any], processes: Processes | None = None, **options: Any
) -> MismatchMonitor:
    processes = processes or Processes(Accelerator(cpu=True))
    return MismatchMonitor(policy(EvenSchedule(), None), processes, clip_ratio=1e-4, **options)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_quantiles_are_numpys(count: int) -> None:
    values = differences(count, 1).flatten()
    gap = torch.full((3,), math.nan)
    for fraction in (0.0, 0.3, 0.5, 0.99, 1.0):
        found = quantile(torch.cat([gap, values.flip(0), gap]), fraction).item()
        assert found == pytest.approx(np.quantile(values.numpy(), fraction), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "digits", "rounded"),
    [
        *((2.1e-4, 1, 3e-4), (3e-4, 1, 3e-4), (9.5e-5, 1, 1e-4), (1.01e-3, 1, 2e-3)),
        *((3.21e-4, 2, 3.3e-4), (9.91e-4, 2, 1e-3), (1.26e-3, 2, 1.3e-3), (0.0, 2, 0.0)),
    ],
)
def test_a_band_is_rounded_up(value: float, digits: int, rounded: float) -> None:
    assert round_up(value, digits) == pytest.approx(rounded, rel=1e-12)


def test_the_metrics_of_one_iteration() -> None:
    """A bypass run in two pieces. A difference that is not finite takes no part."""
    difference = differences(6, 3)
    rollout = torch.zeros(6, 3)
    floor = floor_of(FlowPolicy)
    given = difference.clone()
    given[2, 1] = math.inf
    batch = diffusion_batch(rollout, old_log_probs=rollout)
    floor.before_update(batch.rows(0, 2), given[:2])
    floor.before_update(batch.rows(2, 6), given[2:])
    found = floor.finish(recomputes=False).compute()
    kept = np.delete(difference.numpy().flatten(), 2 * 3 + 1)
    sizes = np.abs(kept)
    wanted = {
        "logprob_abs_diff_mean": sizes.mean(),
        "logprob_abs_diff_p50": np.median(sizes),
        "logprob_abs_diff_p99": np.quantile(sizes, 0.99),
        "logprob_abs_diff_max": sizes.max(),
        "logprob_abs_diff_std_robust": 1.4826 * np.median(np.abs(kept - np.median(kept))),
        "mismatch_over_clip": np.median(sizes) / 1e-4,
        "logprob_abs_diff/ts_1000": difference[:, 0].abs().mean().item(),
        "logprob_abs_diff/ts_750": difference[[0, 1, 3, 4, 5], 1].abs().mean().item(),
        "logprob_abs_diff/ts_500": difference[:, 2].abs().mean().item(),
    }
    assert found == pytest.approx(wanted, rel=1e-12)
    # Another iteration starts afresh.
    floor.before_update(batch, 0.01 * difference)
    again = floor.finish(recomputes=False).compute()
    assert again["logprob_abs_diff_max"] == 0.01 * difference.abs().max()


def test_percentiles_are_those_of_all_processes() -> None:
    """Not means of the processes' own; a process may have more numbers than another."""
    mine = differences(4, 2)
    theirs = 10 * differences(7, 2, seed=1)
    sums = torch.stack([theirs.abs().sum(0), torch.full((2,), 7.0)])
    sums = torch.cat([sums, torch.zeros(2, 1)], 1)
    processes = Others(theirs.flatten(), torch.stack([sums, torch.zeros(2, 3)]))
    floor = floor_of(FlowPolicy, processes)
    floor.before_update(diffusion_batch(torch.zeros(4, 2)), mine)
    found = floor.finish(recomputes=False).compute()
    sizes = np.abs(torch.cat([mine, theirs]).numpy())
    assert found["logprob_abs_diff_p99"] == pytest.approx(np.quantile(sizes, 0.99), rel=1e-12)
    assert found["logprob_abs_diff_mean"] == pytest.approx(sizes.mean(), rel=1e-12)
    assert found["logprob_abs_diff/ts_667"] == pytest.approx(sizes[:, 1].mean(), rel=1e-12)


def test_tokens_have_no_timesteps_and_no_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    difference = differences(2, 3)
    floor = floor_of(TokenPolicy)
    floor.before_update(token_batch(torch.zeros(2, 3), mask), difference)
    found = floor.finish(recomputes=False).compute()
    assert found["logprob_abs_diff_mean"] == pytest.approx(difference[mask].abs().mean().item())
    assert not any("/" in name for name in found)


def test_slimes_names() -> None:
    for names in ("slime", "both"):
        floor = floor_of(FlowPolicy, metric_names=names)
        floor.before_update(diffusion_batch(torch.zeros(2, 2)), differences(2, 2))
        metrics = floor.finish(recomputes=False).compute()
        assert "train_rollout_logprob_abs_diff" in metrics
        assert ("logprob_abs_diff_mean" in metrics) == (names == "both")


def test_nothing_finite_is_nothing_to_report() -> None:
    floor = floor_of(FlowPolicy)
    floor.before_update(diffusion_batch(torch.zeros(2, 2)), torch.full((2, 2), math.nan))
    assert floor.finish(recomputes=False).compute() == {}
    assert "mismatch_over_clip" not in spread(differences(9, 1).flatten(), None).compute()


def test_the_host_waits_only_for_the_names_of_the_timesteps() -> None:
    floor = floor_of(FlowPolicy)
    batch = diffusion_batch(torch.zeros(4, 2), old_log_probs=torch.zeros(4, 2))

    def iteration() -> None:
        floor.before_update(batch, differences(4, 2))
        floor.clipped(MetricBag())
        floor.after_update(batch, differences(4, 2))
        floor.finish(recomputes=False)

    assert transfers(iteration) == 1
    assert transfers(iteration) == 0


@pytest.mark.parametrize("moved", [0.0, 1e-4, 1e-3])
def test_drift_is_measured_without_the_mismatch(moved: float) -> None:
    """Cells have mismatches of different sizes.

    A cell that was not seen before the update takes no part.
    """
    count = 20_000
    scales = torch.tensor([1e-5, 1e-4, 1e-3], dtype=torch.float64)
    noise = [scales * differences(count, 3, scale=1.0, seed=seed) for seed in range(2)]
    movement = differences(count, 3, scale=moved, seed=2)
    counts = torch.full((3,), float(count), dtype=torch.float64)
    before = torch.stack([noise[0].abs().sum(0), counts])
    after = torch.stack([(noise[1] + movement).abs().sum(0), counts])
    total, number = drift(after, before)
    assert (total / number).item() == pytest.approx(movement.abs().mean().item(), rel=0.1, abs=1e-4)
    before[:, 1] = 0
    assert drift(after, before)[1] == 2 * count


Make = Callable[..., tuple[PolicyUpdate, MismatchMonitor, DiffusionBatch]]


@pytest.fixture
def make(model: FlowModel) -> Make:
    """Makes an update of mini-batches of 2 of 4 samples, and the monitor that observes it."""

    def made(*, bypass: bool, epochs: int = 1) -> Any:
        network = trained_lora(model)
        batch, _ = sample_images(model, network, make_spec("sde", 1.0), WINDOWS["all"])
        noise = differences(4, 4).float()
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).unsqueeze(1).expand(4, 4)
        truth = batch.rollout_log_probs
        assert truth is not None
        batch = batch.replace(rollout_log_probs=truth - noise, advantages=advantages)
        batch = batch.replace(old_log_probs=batch.rollout_log_probs if bypass else truth)
        policy = FlowPolicy(model, network)
        processes = Processes(Accelerator(cpu=True))
        correction = RolloutCorrectionConfig(bypass_mode=bypass)
        terms = DiffusionObjective(loss_config(correction, clip=1e-4)).terms
        mode = mode_of(correction, policy, micro_batch_size=2, clip_ratio=1e-4, terms=terms)
        optim = OptimConfig(lr=1e-2)
        actor = ActorConfig(ppo_micro_batch_size_per_gpu=2, ppo_epochs=epochs, optim=optim)
        return PolicyUpdate(mode, actor, processes, total_updates=10), mode.monitor, batch

    return made


@pytest.mark.parametrize("epochs", [1, 2])
def test_bypass_reports_the_first_mini_batch_before_its_update(make: Make, epochs: int) -> None:
    update, floor, batch = make(bypass=True, epochs=epochs)
    noise = differences(4, 4).float()[:2].numpy()
    update.run(batch, 2)
    found = floor.finish(recomputes=False).compute()
    assert found["logprob_abs_diff_mean"] == pytest.approx(np.abs(noise).mean(), rel=0.02)
    assert found["logprob_abs_diff_max"] == pytest.approx(np.abs(noise).max(), rel=0.02)
    assert found["pre_update_clip_fraction"] == np.mean(np.abs(np.expm1(noise)) > 1e-4)
    assert 0 < found["pre_update_clip_fraction"] < 1
    assert found["policy_drift_abs_mean"] > 3e-4  # far above the mismatch, which is of 8e-5


def test_decoupled_mode_clips_no_noise_and_measures_drift_exactly(make: Make) -> None:
    update, floor, batch = make(bypass=False)
    seen: list[tuple[Batch, Tensor]] = []
    after_update = floor.after_update

    def recording(part: Batch, log_probs: Tensor) -> None:
        seen.append((part, log_probs.detach()))
        after_update(part, log_probs)

    floor.after_update = recording  # type: ignore[method-assign]
    floor.before_update(batch, batch.old_log_probs)
    update.run(batch, 2)
    found = floor.finish(recomputes=True).compute()
    assert found["pre_update_clip_fraction"] == 0
    assert found["mismatch_over_clip"] == pytest.approx(
        np.median(differences(4, 4).abs()) / 1e-4, rel=0.02
    )
    moved = torch.cat([(now.double() - part.old_log_probs).abs() for part, now in seen], 1)
    assert moved.shape == (2, 4)
    assert found["policy_drift_abs_mean"] == pytest.approx(moved.mean().item(), rel=1e-12)


def test_a_single_update_has_no_drift_after_it(make: Make) -> None:
    update, floor, batch = make(bypass=True)
    update.run(batch, 4)
    assert "policy_drift_abs_mean" not in floor.finish(recomputes=False).compute()

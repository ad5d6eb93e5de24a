"""The noise floor's numbers against numpy and formulas, over processes, and apart from the policy's
movement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import Train, read_rows
from correction.test_host_transfers import transfers
from policies.test_flow import WINDOWS, make_spec, sample, trained_lora
from policies.test_token import perturb
from policies.test_token import sample as sample_text
from support.builders import diffusion_batch, loss_config, token_batch
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Batch, DiffusionBatch, TokenSpec
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.diffusion import DiffusionObjective
from flowgrpo_rc.models.base import FlowModel, ModelConfig
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.monitoring.expected_mismatch import ExpectedMismatch, relative_size
from flowgrpo_rc.monitoring.mismatch import (
    MismatchMonitor,
    advised_clip_ratio,
    drift,
    over,
    quantile,
    spread,
)
from flowgrpo_rc.policies.base import nudge
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate

RC = "algorithm.rollout_correction"


def differences(rows: int, steps: int, seed: int = 0) -> Tensor:
    return 1e-4 * torch.randn(
        rows, steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


class Others(Processes):
    """The first of several processes whose other ones brought `values` and `sums`."""

    def __init__(self, values: Tensor, sums: Tensor) -> None:
        super().__init__(Accelerator(cpu=True))
        self._values, self._sums = values, sums

    def gather_ragged(self, values: Tensor) -> Tensor:
        return torch.cat([values, self._values])

    def sum(self, value: Tensor) -> Tensor:
        return value + self._sums


def floor_of(
    policy: type[Any], processes: Processes | None = None, **options: Any
) -> MismatchMonitor:
    settings = {"bypass": True, "clip_ratio": 1e-4} | options
    return MismatchMonitor(
        policy(None, None), processes or Processes(Accelerator(cpu=True)), **settings
    )


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles_are_numpys(count: int, fraction: float) -> None:
    values = differences(count, 1).flatten()
    with_gaps = torch.cat([torch.full((3,), math.nan), values.flip(0), torch.full((2,), math.nan)])
    assert quantile(with_gaps, fraction).item() == pytest.approx(
        np.quantile(values.numpy(), fraction), rel=1e-12
    )


@pytest.mark.parametrize(
    ("p99", "wanted"), [(2.1e-4, 3e-4), (3e-4, 3e-4), (9.5e-5, 1e-4), (1.01e-3, 2e-3), (7e-6, 7e-6)]
)
def test_the_advised_band_has_one_digit(p99: float, wanted: float) -> None:
    assert advised_clip_ratio(p99) == wanted


def test_the_metrics_of_one_iteration() -> None:
    """Two pieces of a bypass run; a difference that is not finite takes no part."""
    difference = differences(6, 3)
    rollout = torch.zeros(6, 3)
    floor = floor_of(FlowPolicy)
    given = difference.clone()
    given[2, 1] = math.inf
    batch = diffusion_batch(rollout, old_log_probs=rollout)
    floor.before(batch.rows(0, 2), given[:2])
    floor.before(batch.rows(2, 6), given[2:])
    found = floor.finish().compute()
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


def test_another_iteration_starts_afresh() -> None:
    floor, batch = floor_of(FlowPolicy), diffusion_batch(torch.zeros(4, 2))
    for seed in (0, 1):
        floor.before(batch, differences(4, 2, seed))
        assert (
            floor.finish().compute()["logprob_abs_diff_max"] == differences(4, 2, seed).abs().max()
        )


def test_percentiles_are_those_of_all_processes() -> None:
    """Not a mean of the processes' own; a process may have more numbers than another."""
    mine, theirs = differences(4, 2), 10 * differences(7, 2, seed=1)
    sums = torch.stack([theirs.abs().sum(0), torch.full((2,), 7.0)])
    processes = Others(
        theirs.flatten(), torch.stack([torch.cat([sums, torch.zeros(2, 1)], 1), torch.zeros(2, 3)])
    )
    floor = floor_of(FlowPolicy, processes)
    floor.before(diffusion_batch(torch.zeros(4, 2)), mine)
    found, sizes = floor.finish().compute(), np.abs(torch.cat([mine, theirs]).numpy())
    assert found["logprob_abs_diff_p99"] == pytest.approx(np.quantile(sizes, 0.99), rel=1e-12)
    assert found["logprob_abs_diff_mean"] == pytest.approx(sizes.mean(), rel=1e-12)
    assert found["logprob_abs_diff/ts_667"] == pytest.approx(sizes[:, 1].mean(), rel=1e-12)


def test_tokens_have_no_timesteps_and_no_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    difference = differences(2, 3)
    floor = floor_of(TokenPolicy)
    floor.before(token_batch(torch.zeros(2, 3), mask), difference)
    found = floor.finish().compute()
    assert found["logprob_abs_diff_mean"] == pytest.approx(difference[mask].abs().mean().item())
    assert not any("/" in name for name in found)


@pytest.mark.parametrize("names", ["slime", "both"])
def test_slimes_names(names: str) -> None:
    floor = floor_of(FlowPolicy, metric_names=names)
    floor.before(diffusion_batch(torch.zeros(2, 2)), differences(2, 2))
    found = floor.finish().compute()
    assert "train_rollout_logprob_abs_diff" in found
    assert ("logprob_abs_diff_mean" in found) == (names == "both")


def test_nothing_finite_is_nothing_to_report() -> None:
    floor = floor_of(FlowPolicy)
    floor.before(diffusion_batch(torch.zeros(2, 2)), torch.full((2, 2), math.nan))
    assert floor.finish().compute() == {}


def test_without_a_band_there_is_no_multiple_of_it() -> None:
    assert "mismatch_over_clip" not in spread(differences(9, 1).flatten(), None).compute()


def test_the_host_waits_for_the_names_of_the_timesteps_alone() -> None:
    floor, batch = (
        floor_of(FlowPolicy),
        diffusion_batch(torch.zeros(4, 2), old_log_probs=torch.zeros(4, 2)),
    )

    def iteration() -> None:
        floor.during(batch, differences(4, 2), MetricBag(), updated=False)
        floor.during(batch, differences(4, 2), MetricBag(), updated=True)
        floor.finish()

    assert transfers(iteration) == 1
    assert transfers(iteration) == 0


@pytest.mark.parametrize("moved", [0.0, 1e-4, 1e-3])
def test_drift_without_the_mismatch_that_contains_it(moved: float) -> None:
    """Of cells with mismatches of other sizes; a cell that was not seen before the update takes no
    part.
    """
    source, count = torch.Generator().manual_seed(0), 20_000
    scales = torch.tensor([1e-5, 1e-4, 1e-3], dtype=torch.float64)
    noise = [
        scales * torch.randn(count, 3, generator=source, dtype=torch.float64) for _ in range(2)
    ]
    movement = moved * torch.randn(count, 3, generator=source, dtype=torch.float64)
    counts = torch.full((3,), float(count), dtype=torch.float64)
    before = torch.stack([noise[0].abs().sum(0), counts])
    after = torch.stack([(noise[1] + movement).abs().sum(0), counts])
    total, number = drift(after, before)
    assert (total / number).item() == pytest.approx(movement.abs().mean().item(), rel=0.1, abs=1e-4)
    before[:, 1] = 0
    assert drift(after, before)[1] == 2 * count


def test_a_nudge_is_one_unit_in_the_last_place() -> None:
    values = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[0] = 0
    moved = nudge(values.float(), torch.bfloat16)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, nudge(values, torch.bfloat16))
    assert (moved[0] == 0).all()
    steps = (moved.view(torch.int16) - values.view(torch.int16))[1:]
    assert set(steps.unique().tolist()) <= {-1, 0, 1}
    assert (steps != 0).double().mean() > 0.98  # a half of those at powers of 2 stay
    assert steps.double().mean().abs() < 0.1


class Rounding(FlowPolicy):
    """Log-probs that are 1e-4 apart where they are rounded; counts how often it was asked."""

    asked = 0

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded

    def log_probs(self, batch: DiffusionBatch, micro_batch_size: int) -> Tensor:
        self.asked += 1
        return torch.full(batch.step_indices.shape, 1e-4 if self._rounded else 0.0)


class WithAnother(Processes):
    """One of two processes; the other one's samples are in cells without an expectation."""

    def __init__(self, news: bool) -> None:
        super().__init__(Accelerator(cpu=True))
        self._news = news

    def any(self, flag: bool) -> bool:
        return flag or self._news


@pytest.mark.parametrize(
    ("moved", "elsewhere", "asked"), [(0, False, 1), (2, False, 2), (0, True, 2)]
)
def test_steps_of_another_window_get_their_expectation_at_once(
    moved: int, elsewhere: bool, asked: int
) -> None:
    """A later iteration's mismatch is twice the expectation, wherever its window lies."""
    policy, processes = Rounding(rounded=False), WithAnother(elsewhere)
    expected = ExpectedMismatch(
        policy, Rounding(rounded=True), processes, size=1.0, least=4e-7, micro_batch_size=2
    )
    floor = MismatchMonitor(policy, processes, bypass=False, expected=expected)
    batch = diffusion_batch(torch.zeros(4, 2)).replace(sigmas=torch.linspace(1, 0, 6))
    for step in (1, 2, 3):
        here = batch.replace(step_indices=batch.step_indices + (0 if step == 1 else moved))
        floor.expect(here, step)
        floor.before(here, torch.full((4, 2), 2e-4))
        assert floor.finish().compute()["mismatch_over_expected"] == pytest.approx(2.0)
        if step == 2:
            assert policy.asked == asked
    assert policy.asked == asked + elsewhere


def test_expectation_of_cells_that_nobody_saw() -> None:
    sums = torch.tensor([[6e-4, 2e-4, 5.0], [3.0, 2.0, 1.0]], dtype=torch.float64)
    total, number = over(sums, torch.tensor([1e-4, 1e-4, math.nan], dtype=torch.float64))
    assert (total / number).item() == pytest.approx((6 + 2) / 5)


@pytest.mark.parametrize(
    ("rollout", "dtype", "mixed", "wanted"),
    [
        ("fp32", "fp32", "no", 0.0),
        ("fp32", "fp64", "no", 0.0),
        ("bf16", "fp32", "no", 1.0),
        ("bf16+int8", "fp32", "no", math.hypot(1.0, 0.75)),
        ("fp32", "fp32", "bf16", 1.0),
        ("bf16", "fp32", "bf16", math.hypot(1.0, 1.0)),
        ("bf16", "bf16", "no", 1.0),
        ("bf16", "bf16", "bf16", 1.0),
        ("fp32", "bf16", "no", None),
        ("bf16+int8", "bf16", "no", None),
        ("bf16", "fp64", "no", None),
    ],
)
def test_precisions_add_up_in_squares(
    rollout: str, dtype: str, mixed: str, wanted: float | None
) -> None:
    assert relative_size(rollout, dtype, mixed) == wanted


Make = Callable[..., tuple[PolicyUpdate, MismatchMonitor, DiffusionBatch]]


@pytest.fixture
def make(model: FlowModel) -> Make:
    """An update of mini-batches of 2 of 4 samples, and a floor that listens."""

    def made(*, bypass: bool, epochs: int = 1, lr: float = 1e-2, **batch_fields: Any) -> Any:
        network = trained_lora(model)
        batch, _ = sample(model, network, make_spec("sde", 1.0), WINDOWS["all"])
        noise = differences(4, 4).float()
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).unsqueeze(1).expand(4, 4)
        truth = batch.rollout_log_probs
        assert truth is not None
        batch = batch.replace(
            rollout_log_probs=truth - noise, advantages=advantages, **batch_fields
        )
        batch = batch.replace(old_log_probs=batch.rollout_log_probs if bypass else truth)
        policy, processes = FlowPolicy(model, network), Processes(Accelerator(cpu=True))
        floor = MismatchMonitor(policy, processes, bypass=bypass, clip_ratio=1e-4)
        config = loss_config(RolloutCorrectionConfig(bypass_mode=bypass), clip=1e-4)
        update = PolicyUpdate(
            policy,
            ActorConfig(
                ppo_micro_batch_size_per_gpu=2, ppo_epochs=epochs, optim=OptimConfig(lr=lr)
            ),
            DiffusionObjective(config).terms,
            processes,
            total_updates=10,
            floor=floor,
        )
        return update, floor, batch

    return made


@pytest.mark.parametrize("epochs", [1, 2])
def test_bypass_reports_the_first_mini_batch_before_its_update(make: Make, epochs: int) -> None:
    update, floor, batch = make(bypass=True, epochs=epochs)
    noise = differences(4, 4).float()[:2].numpy()
    update.run(batch, 2)
    found = floor.finish().compute()
    assert found["logprob_abs_diff_mean"] == pytest.approx(np.abs(noise).mean(), rel=0.02)
    assert found["logprob_abs_diff_max"] == pytest.approx(np.abs(noise).max(), rel=0.02)
    assert found["pre_update_clip_fraction"] == np.mean(np.abs(np.expm1(noise)) > 1e-4)
    assert 0 < found["pre_update_clip_fraction"] < 1
    assert found["policy_drift_abs_mean"] > 3e-4  # far above the mismatch, which is of 8e-5


def test_decoupled_mode_clips_no_noise_and_measures_drift_exactly(make: Make) -> None:
    update, floor, batch = make(bypass=False)
    seen: list[tuple[Batch, Tensor]] = []
    during = floor.during

    def recording(part: Batch, log_probs: Tensor, metrics: MetricBag, *, updated: bool) -> None:
        if updated:
            seen.append((part, log_probs.detach()))
        during(part, log_probs, metrics, updated=updated)

    floor.during = recording  # type: ignore[method-assign]
    floor.before(batch, batch.old_log_probs)
    update.run(batch, 2)
    found = floor.finish().compute()
    assert found["pre_update_clip_fraction"] == 0
    assert found["mismatch_over_clip"] == pytest.approx(
        np.median(differences(4, 4).abs()) / 1e-4, rel=0.02
    )
    moved = torch.cat([(now.double() - part.old_log_probs).abs() for part, now in seen], 1)
    assert moved.shape == (2, 4)
    assert found["policy_drift_abs_mean"] == pytest.approx(moved.mean().item(), rel=1e-12)


def test_one_update_has_nothing_after_it(make: Make) -> None:
    update, floor, batch = make(bypass=True)
    update.run(batch, 4)
    assert "policy_drift_abs_mean" not in floor.finish().compute()


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_a_run_reports_it(train: Train, tmp_path: Path, mode: str) -> None:
    """The first mini-batch has half of the samples; the learning rate moves the policy far beyond
    the mismatch.
    """
    assert (
        train(
            f"{RC}.bypass_mode={str(mode == 'bypass').lower()}",
            "rollout.dtype=bf16",
            "actor.optim.lr=0.1",
        )
        == 0
    )
    prefix = "actor/rollout_corr/" if mode == "bypass" else "rollout_corr/"
    for row in read_rows(tmp_path / "run")[1:]:
        own = {
            name.removeprefix(prefix): value
            for name, value in row.items()
            if name.startswith(prefix)
        }
        median, p99, most = (own[f"logprob_abs_diff_{part}"] for part in ("p50", "p99", "max"))
        assert 0 < median < p99 <= most < 0.01 < own["policy_drift_abs_mean"]
        assert own["mismatch_over_clip"] == pytest.approx(median / 1e-4)
        assert (own["pre_update_clip_fraction"] == 0) == (mode == "decoupled")
        assert 0.3 < own["mismatch_over_expected"] < 2.0
    assert not (tmp_path / "run" / "health.jsonl").exists()


@pytest.mark.parametrize("rollout", ["bf16", "fp32"])
def test_a_run_in_bf16_expects_its_rounding_or_says_that_it_cannot(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture, rollout: str
) -> None:
    one_step = ["trainer.total_training_steps=1", "actor.ema.enable=false"]
    assert (
        train("model.dtype=bf16", f"rollout.dtype={rollout}", f"{RC}.bypass_mode=true", *one_step)
        == 0
    )
    row, said = read_rows(tmp_path / "run")[-1], capsys.readouterr().out
    assert ("actor/rollout_corr/mismatch_over_expected" in row) == (rollout == "bf16")
    assert ("no fault of the engine is reported" in said) == (rollout == "fp32")


def test_moving_the_embeddings_of_text_shows_its_rounding() -> None:
    settings = ModelConfig(
        kind="causal_lm", path=str(assets.path("tiny_adder_lm")), lora_rank=4, dtype="bf16"
    )
    language = load_causal_lm(settings, torch.device("cpu"))
    policy = TokenPolicy(language, add_lora(language, settings, seed=0))
    perturb(policy.network)
    batch, _ = sample_text(
        language,
        TokenSpec(dtype="fp32", temperature=1.0, prompt_length=8, response_length=6),
        chunk=2,
    )
    before = policy.log_probs(batch, 4)
    expected = ExpectedMismatch(
        policy,
        policy.nudged(),
        Processes(Accelerator(cpu=True)),
        size=1.0,
        least=4e-6,
        micro_batch_size=4,
    )
    expected.measure(batch, 1)
    assert torch.equal(policy.log_probs(batch, 4), before)
    mismatch = (before - batch.rollout_log_probs)[batch.valid].abs().mean().item()
    assert 0.4 < mismatch / expected.values(torch.zeros(2, 1)).item() < 1.8

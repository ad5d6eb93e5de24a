"""The mismatch that the precisions of rollout and training explain."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.builders import diffusion_batch
from support.text_rollouts import perturb, sample_texts
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.batch import DiffusionBatch, TokenSpec
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.monitoring.expected_mismatch import ExpectedMismatch, relative_size
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor, over
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.policies.token import TokenPolicy


class Rounding(FlowPolicy):
    """A policy whose rounded copy is off by 1e-4; it counts how often it was asked."""

    asked = 0

    def __init__(self, *, rounded: bool) -> None:
        self._rounded = rounded

    def cell_names(self, batch: DiffusionBatch) -> list[str]:
        return [f"ts_{step}" for step in range(len(batch.sigmas) - 1)]

    def log_probs(self, batch: DiffusionBatch, micro_batch_size: int) -> Tensor:
        self.asked += 1
        return torch.full(batch.step_indices.shape, 1e-4 if self._rounded else 0.0)


class WithAnother(Processes):
    """One of two processes, of which the other may have samples in cells without expectation."""

    def any(self, flag: bool) -> bool:
        return True


def expectation(*arguments: Any, enough: int = 1) -> ExpectedMismatch:
    """Makes what is expected of a policy, its rounded copy and the processes."""
    return ExpectedMismatch(*arguments, size=1.0, least=4e-7, micro_batch_size=2, enough=enough)


@pytest.mark.parametrize(
    ("moved", "elsewhere", "asked"), [(0, False, 1), (2, False, 2), (0, True, 2)]
)
def test_steps_of_another_window_get_their_expectation_at_once(
    moved: int, elsewhere: bool, asked: int
) -> None:
    """The mismatch is always twice the expectation, wherever the window of an iteration lies."""
    policy = Rounding(rounded=False)
    processes = (WithAnother if elsewhere else Processes)(Accelerator(cpu=True))
    expected = expectation(policy, Rounding(rounded=True), processes)
    floor = MismatchMonitor(policy, processes, expected=expected)
    batch = diffusion_batch(torch.zeros(4, 2)).replace(sigmas=torch.linspace(1, 0, 6))
    for step in (1, 3, 4):
        here = batch.replace(step_indices=batch.step_indices + (0 if step == 1 else moved))
        floor.expect(here, step)
        floor.before_update(here, torch.full((4, 2), 2e-4))
        found = floor.finish(recomputes=True).compute()
        assert found["mismatch_over_expected"] == pytest.approx(2.0)
        if step == 3:
            assert policy.asked == asked
    assert policy.asked == asked + elsewhere
    # In the second iteration the LoRA is no longer zero, and rounding it costs something.
    assert [step for step in range(2, 203) if expected.due(step, batch)] == (
        list(range(2, 203)) if elsewhere else [2, 101, 102, 201, 202]
    )


def test_small_iterations_are_measured_and_reported_together() -> None:
    """Iterations of 8 observations, of which 20 are needed; a checkpoint after each of them."""
    processes = Processes(Accelerator(cpu=True))
    batch = diffusion_batch(torch.zeros(4, 2)).replace(sigmas=torch.linspace(1, 0, 6))
    state: dict[str, Tensor] = {}
    reported, due = [], []
    for step, size in enumerate((1.0, 2.0, 3.0, 6.0, 6.0, 6.0, 9.0), start=1):
        policy = Rounding(rounded=False)
        expected = expectation(policy, Rounding(rounded=True), processes, enough=20)
        monitor = MismatchMonitor(policy, processes, expected=expected)
        monitor.load(state)
        due.append(expected.due(step, batch))
        monitor.expect(batch, step)
        monitor.before_update(batch, torch.full((4, 2), size * 1e-4))
        found = monitor.finish(recomputes=True).compute()
        reported.append(found.get("mismatch_over_expected"))
        state = monitor.tensors()
    assert reported == [None, None, pytest.approx(2.0), None, None, pytest.approx(6.0), None]
    assert due == [True, True, True, False, False, False, False]


def test_cells_that_were_never_measured_have_no_expectation() -> None:
    sums = torch.tensor([[6e-4, 2e-4, 5.0], [3.0, 2.0, 1.0]], dtype=torch.float64)
    total, number = over(sums, torch.tensor([1e-4, 1e-4, math.nan], dtype=torch.float64))
    assert (total / number).item() == pytest.approx((6 + 2) / 5)


@pytest.mark.parametrize(
    ("rollout", "dtype", "mixed", "wanted"),
    [
        ("fp32", "fp32", "no", 0.0),
        ("bf16", "fp32", "no", 1.0),
        ("bf16+int8", "fp32", "no", math.hypot(1.0, 0.75)),
        ("fp32", "fp32", "bf16", 1.0),
        ("bf16", "fp32", "bf16", math.hypot(1.0, 1.0)),
        ("bf16", "bf16", "no", 1.0),
        ("fp32", "bf16", "no", None),
        ("bf16", "fp64", "no", None),
    ],
)
def test_precisions_add_up_in_squares(
    rollout: str, dtype: str, mixed: str, wanted: float | None
) -> None:
    assert relative_size(rollout, dtype, mixed) == wanted


@pytest.mark.kernels
def test_moving_the_embeddings_of_text_shows_its_rounding() -> None:
    settings = ModelConfig(
        kind="causal_lm", path=str(assets.path("tiny_adder_lm")), lora_rank=4, dtype="bf16"
    )
    language = load_causal_lm(settings, torch.device("cpu"))
    policy = TokenPolicy(language, add_lora(language, settings, seed=0))
    perturb(policy.network)
    batch, _ = sample_texts(
        language,
        TokenSpec(dtype="fp32", temperature=1.0, prompt_length=8, response_length=6),
        chunk=2,
    )
    before = policy.log_probs(batch, 4)
    processes = Processes(Accelerator(cpu=True))
    expected = expectation(policy, policy.rounded_otherwise(), processes)
    expected.measure(batch, 1)
    assert torch.equal(policy.log_probs(batch, 4), before)
    mismatch = (before - batch.rollout_log_probs)[batch.step_mask].abs().mean().item()
    assert 0.4 < mismatch / expected.values(torch.zeros(2, 1)).item() < 1.8

"""`actor.steps_per_forward`: several SDE steps in one forward change nothing but the time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.builders import loss_config
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of, update_of
from support.subjects import with_own_network
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.policies.flow import FlowPolicy

# Forwards of 4 steps in pieces of 1, of 3 and 1, and of all.
SIZES = {1: 4, 3: 2, None: 1}
BYPASS = {"bypass_mode": True}
WINDOW = {"bypass_mode": True, "bypass_level": "window"}
BAND = {"rollout_rs_threshold": "0.9998_1.0002"}
CASES: dict[str, dict[str, Any]] = {
    "bypass": BYPASS | BAND | {"rollout_rs": "token_k1", "rollout_is": "token"},
    "bypass sequence": BYPASS | BAND | {"rollout_rs": "seq_mean_k1"},
    "bypass auto": BYPASS | {"rollout_rs": "token_k1", "rollout_rs_threshold": "auto:4"},
    "bypass centered": BYPASS | {"centered": True},
    "bypass normalized": BYPASS
    | {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "window": WINDOW | BAND | {"rollout_rs": "seq_mean_k1"},
    "window auto": WINDOW | {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto:4"},
    "window reinforce": WINDOW | {"loss_type": "reinforce", "rollout_is": "sequence"},
    "decoupled": BAND | {"rollout_rs": "seq_mean_k1", "rollout_is": "sequence"},
    "decoupled own": BAND | {"rollout_rs": "token_k1", "rollout_is": "token"},
    "decoupled centered": {"centered": True},
}
KL = {"use_kl_loss": True, "kl_loss_coef": 10.0}


class Counted(FlowPolicy):
    """Counts the forwards that are differentiated."""

    count = 0

    def evaluate(self, piece: DiffusionBatch) -> Evaluation:
        self.count += torch.is_grad_enabled()
        return super().evaluate(piece)


class Result(NamedTuple):
    """Holds what an iteration did."""

    gradients: list[Tensor]
    metrics: dict[str, float]
    decisions: list[Any]
    forwards: int


@pytest.fixture(scope="session")
def fp64(checkpoint: Path) -> FlowModel:
    return load_model(ModelConfig(path=str(checkpoint), dtype="fp64"), torch.device("cpu"))


def sampled(model: FlowModel, window: str = "per_sample") -> DiffusionBatch:
    """Samples with a LoRA in bf16; the batch is in the precision of the model."""
    network = trained_lora(model)
    for parameter in lora_parameters(network).values():
        parameter.data = parameter.data.to(network.dtype)
    spec = make_spec("sde", 4.5, dtype="bf16")
    batch, _ = sample_images(model, network, spec, WINDOWS[window], keep_means=True)
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5]).unsqueeze(1).expand(4, batch.num_steps)
    names = ("all_latents", "sigmas", "rollout_log_probs", "prev_sample_mean")
    precise = {name: getattr(batch, name).to(network.dtype) for name in names}
    return batch.replace(advantages=advantages, **precise)


def iterate(
    model: FlowModel,
    batch: DiffusionBatch,
    size: int | None,
    config: LossConfig,
    actor: dict[str, Any],
    *,
    own_forwards: bool = False,
) -> Result:
    """Runs an iteration of two updates from the same weights."""
    policy = Counted(model, model.transformer, steps_per_forward=size)
    start = {name: p.detach().clone() for name, p in lora_parameters(policy.network).items()}
    correction = config.rollout_correction
    bands = None
    if auto := correction.rules().auto:
        bands = warm(AutoBands(auto, 5, torch.device("cpu"), num_mini_batches=2), batch)
    mode = mode_of(
        correction,
        policy,
        micro_batch_size=2,
        auto_bands=bands,
        own_forwards=own_forwards,
        keep_means=config.diffusion_loss.loss().needs_means,
        terms=DiffusionObjective(config).terms,
    )
    update = update_of(mode, lr=1e-4, **actor)
    gradients: list[Tensor] = []
    update._optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(copy.deepcopy([p.grad for p in update.parameters]))
    )
    metrics = update.run(mode.begin(batch, 1), 2)
    mode.finish(metrics)
    for name, parameter in lora_parameters(policy.network).items():
        parameter.data.copy_(start[name])
    return Result(gradients, metrics.compute(), mode.decisions.take(), policy.count)


def warm(bands: AutoBands, batch: DiffusionBatch) -> AutoBands:
    """Lets the bands see mismatches of about 1e-4."""
    past = torch.linspace(-1e-4, 1e-4, 64).unsqueeze(1)
    rows = batch.select(torch.zeros(64, dtype=torch.int64))
    for t in range(5):
        step = rows.step(0).replace(
            step_indices=torch.full((64, 1), t), rollout_log_probs=torch.zeros_like(past)
        )
        for updates in range(2):
            bands.judge(step, past, None, updates=updates)
    bands.finish(lambda rows: rows)
    return bands


def assert_equal(found: Result, expect: Result, *, tolerance: float) -> None:
    assert found.metrics == pytest.approx(expect.metrics, rel=tolerance, abs=tolerance)
    largest = max(gradient.abs().max().item() for gradient in expect.gradients)
    assert len(found.gradients) == len(expect.gradients) > 0
    assert largest > 0
    for one, other in zip(found.gradients, expect.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)
    assert len(found.decisions) == len(expect.decisions) > 0
    for one, other in zip(found.decisions, expect.decisions, strict=True):
        assert torch.equal(one.seed, other.seed)
        assert torch.equal(one.cells, other.cells)
        assert torch.equal(one.keep_mask, other.keep_mask)


@pytest.mark.parametrize("case", CASES)
def test_every_correction_is_the_same(fp64: FlowModel, case: str) -> None:
    model = with_own_network(fp64)
    batch = sampled(model, "all")
    correction = RolloutCorrectionConfig(**CASES[case])
    correction.validate()
    config = loss_config(correction, clip=1e-4)
    own = case == "decoupled own"
    found = {size: iterate(model, batch, size, config, {}, own_forwards=own) for size in SIZES}
    for size, forwards in SIZES.items():
        assert found[size].forwards == 2 * forwards
        assert_equal(found[size], found[1], tolerance=1e-12)


@pytest.mark.parametrize(
    ("loss", "actor"),
    [("flow_grpo", KL), ("flow_grpo", {"ppo_epochs": 2}), ("grpo_guard", {}), ("flow_dppo", KL)],
)
@pytest.mark.parametrize("mode", ["bypass", "window", "decoupled own"])
def test_every_loss_is_the_same(
    fp64: FlowModel, mode: str, loss: str, actor: dict[str, Any]
) -> None:
    """Windows start at different steps, so one forward has several timesteps in any case."""
    model = with_own_network(fp64)
    batch = sampled(model)
    settings = DiffusionLossConfig(loss_mode=loss)
    config = LossConfig(
        diffusion_loss=settings, rollout_correction=RolloutCorrectionConfig(**CASES[mode])
    )
    own = mode == "decoupled own"
    one, together = (
        iterate(model, batch, size, config, actor, own_forwards=own) for size in (1, None)
    )
    assert_equal(together, one, tolerance=1e-12)


def test_the_kl_penalty_counts_by_its_coefficient(fp64: FlowModel) -> None:
    """Without advantages the gradient is that of the penalty alone."""
    model = with_own_network(fp64)
    batch = sampled(model)
    batch = batch.replace(advantages=0 * batch.advantages)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True))
    one, ten = (
        iterate(model, batch, 1, config, KL | {"kl_loss_coef": coefficient}).metrics["grad_norm"]
        for coefficient in (1.0, 10.0)
    )
    assert one > 0
    assert ten == pytest.approx(10 * one, rel=1e-3)


def test_fp32_and_checkpointed_gradients_are_close(model: FlowModel) -> None:
    batch = sampled(model, "all")
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=1e-4)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        results += [iterate(model, batch, size, config, {}) for size in (1, None)]
    one, together, checkpointed, both = results
    assert_equal(checkpointed, one, tolerance=0)
    assert_equal(both, together, tolerance=0)
    size = torch.cat([gradient.flatten() for gradient in one.gradients]).norm()
    for gradient, other in zip(together.gradients, one.gradients, strict=True):
        assert (gradient - other).norm() <= 1e-3 * size

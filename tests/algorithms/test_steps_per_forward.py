"""`actor.steps_per_forward`: several SDE steps in one forward change nothing but the time."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.builders import loss_config
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of, update_of
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

BYPASS = {"bypass_mode": True}
WINDOW = {"bypass_mode": True, "bypass_level": "window"}
BAND = {"rollout_rs_threshold": "0.9998_1.0002"}
SEQUENCE = BAND | {"rollout_rs": "seq_mean_k1"}
AUTO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto:4"}
STEPS = BAND | {"rollout_rs": "token_k1", "rollout_is": "token"}
KL = {"use_kl_loss": True, "kl_loss_coef": 10.0}
# Settings of the correction, the loss, those of the actor, and SDE steps of a forward; where
# `own_forwards` is true, decoupled mode takes its old policy from the update's forwards.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], int | None]] = {
    "bypass": (BYPASS | STEPS, "flow_grpo", KL, 3),
    "bypass auto": (BYPASS | AUTO | {"rollout_rs": "token_k1"}, "flow_grpo", {}, 3),
    "bypass guard": (BYPASS | {"centered": True}, "grpo_guard", {}, None),
    "bypass normalized": (
        BYPASS
        | {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
        "flow_grpo",
        {},
        3,
    ),
    "window": (WINDOW | SEQUENCE, "flow_dppo", KL, 3),
    "window auto": (WINDOW | AUTO, "flow_grpo", {"ppo_epochs": 2}, None),
    "decoupled": (SEQUENCE | {"rollout_is": "sequence"}, "flow_grpo", {}, 3),
    "decoupled own": (STEPS, "flow_dppo", {"ppo_epochs": 2}, 3),
    "decoupled own guard": (STEPS | {"centered": True}, "grpo_guard", KL, None),
}
# Forwards of 4 steps in pieces of 1, of 3 and 1, and of all.
FORWARDS = {1: 4, 3: 2, None: 1}


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


@pytest.fixture(scope="module")
def fp64(checkpoint: Path) -> tuple[FlowModel, DiffusionBatch]:
    """A model, whose weights `iterate` puts back, and samples whose windows hold four steps."""
    model = load_model(ModelConfig(path=str(checkpoint), dtype="fp64"), torch.device("cpu"))
    return model, sampled(model)


def sampled(model: FlowModel) -> DiffusionBatch:
    """Samples with a LoRA in bf16; the batch is in the precision of the model."""
    network = trained_lora(model)
    for parameter in lora_parameters(network).values():
        parameter.data = parameter.data.to(network.dtype)
    spec = make_spec("sde", 4.5, dtype="bf16")
    batch, _ = sample_images(model, network, spec, WINDOWS["all"], keep_means=True)
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


def assert_equal(actual: Result, expect: Result, *, tolerance: float) -> None:
    assert actual.metrics == pytest.approx(expect.metrics, rel=tolerance, abs=tolerance)
    largest = max(gradient.abs().max().item() for gradient in expect.gradients)
    assert len(actual.gradients) == len(expect.gradients) > 0
    assert largest > 0
    for single, other in zip(actual.gradients, expect.gradients, strict=True):
        torch.testing.assert_close(single, other, rtol=0, atol=tolerance * largest)
    assert len(actual.decisions) == len(expect.decisions) > 0
    for single, other in zip(actual.decisions, expect.decisions, strict=True):
        assert torch.equal(single.seed, other.seed)
        assert torch.equal(single.cells, other.cells)
        assert torch.equal(single.keep_mask, other.keep_mask)


@pytest.mark.parametrize("case", CASES)
def test_steps_of_one_forward_change_nothing(
    fp64: tuple[FlowModel, DiffusionBatch], case: str
) -> None:
    settings, loss_mode, actor, size = CASES[case]
    correction = RolloutCorrectionConfig(**settings)
    correction.validate()
    config = LossConfig(
        diffusion_loss=DiffusionLossConfig(loss_mode=loss_mode), rollout_correction=correction
    )
    own = case.startswith("decoupled own")
    single, together = (iterate(*fp64, n, config, actor, own_forwards=own) for n in (1, size))
    assert_equal(together, single, tolerance=1e-12)
    assert single.forwards * FORWARDS[size] == together.forwards * FORWARDS[1]


def test_the_kl_penalty_counts_by_its_coefficient(fp64: tuple[FlowModel, DiffusionBatch]) -> None:
    """Without advantages the gradient is that of the penalty alone."""
    model, batch = fp64
    batch = batch.replace(advantages=0 * batch.advantages)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True))
    once, tenfold = (
        iterate(model, batch, None, config, KL | {"kl_loss_coef": coefficient}).metrics["grad_norm"]
        for coefficient in (1.0, 10.0)
    )
    assert once > 0
    assert tenfold == pytest.approx(10 * once, rel=1e-3)


def test_fp32_and_checkpointed_gradients_are_close(model: FlowModel) -> None:
    batch = sampled(model)
    config = loss_config(RolloutCorrectionConfig(bypass_mode=True), clip=1e-4)
    single, together = (iterate(model, batch, size, config, {}) for size in (1, None))
    model.transformer.enable_gradient_checkpointing()
    assert_equal(iterate(model, batch, None, config, {}), together, tolerance=0)
    size = torch.cat([gradient.flatten() for gradient in single.gradients]).norm()
    for gradient, other in zip(together.gradients, single.gradients, strict=True):
        assert (gradient - other).norm() <= 1e-3 * size

"""Training on finished samples: the gradient, and the old policy that follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.image_rollouts import make_spec, sample_images, trained_lora

from flowgrpo_rc.algorithms.diffusion_nft.algorithm import ForwardProcess
from flowgrpo_rc.algorithms.diffusion_nft.graph import VelocityGraph
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.diffusion_nft import DiffusionNFT
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters, other_weights
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig, EMAConfig, OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate

LR = 1e-3
LIMIT = 2.0
ADVANTAGES = (1.5, -3.0, 0.5, 1.0)  # the second one is clipped to -LIMIT


def make(
    model: FlowModel, loss: DiffusionNFT, *, micro: int
) -> tuple[PolicyUpdate, ForwardProcess]:
    algorithm = ForwardProcess(
        VelocityGraph(FlowPolicy(model, model.transformer, steps_per_forward=1)),
        loss,
        adv_clip_max=LIMIT,
        micro_batch_size=micro,
    )
    actor = ActorConfig(
        optim=OptimConfig(lr=LR, clip_grad=1e9, weight_decay=0.0), ema=EMAConfig(enable=False)
    )
    processes = Processes(Accelerator(cpu=True))
    return PolicyUpdate(algorithm, actor, processes, total_updates=10), algorithm


@pytest.fixture
def batch(model: FlowModel) -> DiffusionBatch:
    """Four finished samples with advantages for two noise levels."""
    found, _ = sample_images(model, trained_lora(model), make_spec("sde", 1.0), [[]])
    return found.replace(advantages=torch.tensor(ADVANTAGES).unsqueeze(1).expand(4, 2))


def weights(model: FlowModel) -> dict[str, torch.Tensor]:
    found = lora_parameters(model.transformer)
    return {name: p.detach().clone() for name, p in found.items()}


def test_the_gradient_is_that_of_the_formula(model: FlowModel, batch: DiffusionBatch) -> None:
    """By autograd through clean samples predicted from x_t, with a moved current policy."""
    loss = DiffusionNFT(beta=0.5, times=2)
    update, algorithm = make(model, loss, micro=2)
    old = weights(model)
    with torch.no_grad():
        for parameter in lora_parameters(model.transformer).values():
            parameter.add_(0.01)
    policy = algorithm.policy
    ready = algorithm.begin(batch, 1)
    now = policy.evaluate(ready)
    with torch.no_grad(), other_weights(lora_parameters(model.transformer), old):
        v_old = policy.evaluate(ready).velocity.double()
    t = ready.sigmas[ready.step_indices].double()[..., None, None, None]
    clean = ready.all_latents[:, 1:].double()
    noise = now.target.double() + clean
    noised = (1 - t) * clean + t * noise
    r = (torch.tensor(ADVANTAGES).double().clamp(-LIMIT, LIMIT) / LIMIT + 1) / 2
    total = torch.zeros((), dtype=torch.float64)
    for share, sign in ((r, 1), (1 - r, -1)):
        velocity = v_old + sign * 0.5 * (now.velocity.double() - v_old)
        error = noised - t * velocity - clean
        weight = error.detach().abs().mean((2, 3, 4), keepdim=True)
        total = total + (share[:, None] * (error**2 / weight).mean((2, 3, 4)) / 0.5).sum()
    parameters = list(lora_parameters(model.transformer).values())
    wanted = torch.autograd.grad(LIMIT * total / 8, parameters)

    minis = ready.replace(advantages=batch.advantages)
    found: list[torch.Tensor] = []
    step = update._step
    update._step = lambda metrics: found.extend(p.grad.clone() for p in parameters)  # type: ignore
    update._mini_batch(minis, MetricBag())
    update._step = step  # type: ignore
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-3, atol=2e-7)


def test_the_old_policy_samples_and_follows(model: FlowModel, batch: DiffusionBatch) -> None:
    loss = DiffusionNFT(times=2, old_decay_rate=0.2, old_decay_max=0.3)
    update, algorithm = make(model, loss, micro=4)
    start = weights(model)
    ready = algorithm.begin(batch, 1).replace(advantages=batch.advantages)
    metrics = update.run(ready, 4).compute()
    assert metrics["old_deviation"] == 0  # the first update starts at the old policy
    assert metrics["positive_loss"] == metrics["negative_loss"] > 0
    moved = weights(model)
    sampling = algorithm.sampling_weights(update.lora_state())
    assert all(torch.equal(sampling[name], start[name]) for name in start)
    bag = MetricBag()
    algorithm.finish(bag)
    assert bag.compute() == {"actor/old_decay": pytest.approx(0.2)}
    for name, value in algorithm.sampling_weights({}).items():
        wanted = 0.2 * start[name].double() + 0.8 * moved[name].double()
        np.testing.assert_allclose(value.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-8)
    saved = {
        name: {k: v.clone() for k, v in part.items()} for name, part in algorithm.tensors().items()
    }
    update.run(ready, 2)
    algorithm.finish(MetricBag())
    algorithm.load(saved)
    assert all(
        torch.equal(algorithm.tensors()["old_policy"][k], v) for k, v in saved["old_policy"].items()
    )
    update.run(ready, 4)  # the second update after the state that was loaded
    algorithm.finish(bag := MetricBag())
    assert bag.compute() == {"actor/old_decay": pytest.approx(0.3)}

"""Training on finished samples: the gradient, and the old policy that follows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.compositions import checked_config
from support.image_rollouts import make_spec, sample_images, trained_lora
from support.verl_omni_commands import NFT

from flowgrpo_rc.algorithms.diffusion_nft.algorithm import ForwardProcess
from flowgrpo_rc.algorithms.diffusion_nft.graph import VelocityGraph
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.losses.diffusion_nft import DiffusionNFT
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters, other_weights, reference_policy
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.training.config import ActorConfig, EMAConfig, OptimConfig
from flowgrpo_rc.training.update import PolicyUpdate

LR = 1e-3
LIMIT = 2.0
ADVANTAGES = (1.5, -3.0, 0.5, 1.0)  # the second one is clipped to -LIMIT


def make(
    model: FlowModel, loss: Any, *, micro: int, limit: float = LIMIT, **further: Any
) -> tuple[PolicyUpdate, ForwardProcess]:
    algorithm = ForwardProcess(
        VelocityGraph(FlowPolicy(model, model.transformer, steps_per_forward=1)),
        loss,
        adv_clip_max=limit,
        micro_batch_size=micro,
    )
    optim = OptimConfig(lr=LR, clip_grad=1e9, weight_decay=0.0)
    actor = ActorConfig(optim=optim, ema=EMAConfig(enable=False), **further)
    processes = Processes(Accelerator(cpu=True))
    return PolicyUpdate(algorithm, actor, processes, total_updates=10), algorithm


@pytest.fixture
def batch(model: FlowModel) -> DiffusionBatch:
    """Four finished samples with advantages for two noise levels."""
    actual, _ = sample_images(model, trained_lora(model), make_spec("sde", 1.0), [[]])
    return actual.replace(advantages=torch.tensor(ADVANTAGES).unsqueeze(1).expand(4, 2))


def weights(model: FlowModel) -> dict[str, torch.Tensor]:
    actual = lora_parameters(model.transformer)
    return {name: p.detach().clone() for name, p in actual.items()}


@pytest.mark.parametrize("further", [["mix_beta=0.5", "ref_kl_coef=10", "adv_clip_max=2"]])
def test_the_script_of_verl_omni_has_the_loss_of_its_code(
    checkpoint: Path, further: list[str]
) -> None:
    """Values and gradient against its formula, by autograd through predicted clean samples."""
    model = load_model(ModelConfig(path=str(checkpoint), dtype="fp64"), torch.device("cpu"))
    network, spec = trained_lora(model), make_spec("sde", 1.0, dtype="fp64")
    batch, _ = sample_images(model, network, spec, [[]])
    advantages = torch.tensor([1.5, -7.0, 0.5, 1.0], dtype=torch.float64)
    own = [f"actor_rollout_ref.actor.diffusion_loss.{each}" for each in further]
    actor = checked_config(compose_config([*NFT, *own])).actor
    chosen = {key: getattr(actor, key) for key in ("use_kl_loss", "kl_loss_coef")}
    section = actor.diffusion_loss
    update, algorithm = make(model, section.loss(), micro=2, limit=section.adv_clip_max, **chosen)
    named = lora_parameters(network)
    old = weights(model)
    with torch.no_grad():
        for parameter in named.values():
            parameter.add_(0.01)
    policy = algorithm.policy
    ready = algorithm.begin(batch, 1)
    assert ready.num_steps == spec.num_inference_steps
    now = policy.evaluate(ready)
    with torch.no_grad(), other_weights(named, old):
        v_old = policy.evaluate(ready).velocity.double()
    with torch.no_grad(), reference_policy(network):
        v_ref = policy.evaluate(ready).velocity.double()

    beta, coefficient, most = (0.5, 10.0, 2.0) if further else (0.1, 1e-4, 5.0)
    v = now.velocity.double()
    t = ready.sigmas[ready.step_indices].double()[..., None, None, None]
    x0 = ready.all_latents[:, 1:].double()
    xt = (1 - t) * x0 + t * (now.target.double() + x0)
    probability = ((advantages.clamp(-most, most) / most) / 2 + 0.5)[:, None]
    policy_loss = torch.zeros((), dtype=torch.float64)
    for share, sign in ((probability, 1), (1 - probability, -1)):
        error = xt - t * (sign * beta * v + (1 - sign * beta) * v_old) - x0
        weight = error.detach().abs().mean((2, 3, 4), keepdim=True).clip(1e-5)
        policy_loss = (
            policy_loss + (most * share * (error**2 / weight).mean((2, 3, 4)) / beta).mean()
        )
    ref_kl_loss = ((v - v_ref) ** 2).mean()
    parameters = list(named.values())
    wanted = torch.autograd.grad(policy_loss + coefficient * ref_kl_loss, parameters)

    mini = ready.replace(advantages=advantages.unsqueeze(1).expand(4, ready.num_steps))
    actual: list[torch.Tensor] = []
    update._step = lambda metrics: actual.extend(p.grad.clone() for p in parameters)  # type: ignore
    update._mini_batch(mini, bag := MetricBag())
    measured = [bag.compute()[name] for name in ("pg_loss", "kl_loss")]
    assert measured == pytest.approx([policy_loss.item(), ref_kl_loss.item()], rel=1e-6)
    size = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    for ours, theirs in zip(actual, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * size


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

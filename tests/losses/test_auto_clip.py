"""`clip_ratio: auto:k` follows the mismatch before an update, and holds a movement back."""

import math
from dataclasses import dataclass

import pytest
import torch
from support.builders import diffusion_batch
from support.compositions import config_of, spec_of
from support.oracles import Clip, clipped
from torch import Tensor

from flowgrpo_rc import DiffusionLossConfig, LossConfig, RolloutCorrectionConfig, diffusion_loss
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.correction.history import MEMORY, WARM_UP
from flowgrpo_rc.losses.auto_clip import AutoClip
from flowgrpo_rc.losses.flow_grpo import FlowGRPO
from flowgrpo_rc.spec.check_settings import check_settings

# A mismatch that grows along the trajectory; its bounds are above those of the recipes.
FLOORS = torch.tensor([2e-3, 3e-3, 5e-3, 2e-2]).double()
STD = 0.5
CLIP = "actor.diffusion_loss.clip_ratio"
MODE = f"actor.diffusion_loss.loss_mode={__name__}"


@dataclass(frozen=True, kw_only=True)
class Strict(FlowGRPO):
    """Checks its option as a number."""

    def __post_init__(self) -> None:
        if not (self.clip_ratio > 0) or isinstance(self.clip_ratio, Tensor):
            raise ValueError("clip_ratio must be a number above 0")


class Silent(FlowGRPO):
    """Does not say what it bounds."""

    def bound(self, *_: object, **__: object) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Both(FlowGRPO):
    """Reads both bounds, and says what one of them is about."""

    kl_threshold: float | Tensor


def auto_clip(
    deviations: float = 4.0,
    loss_mode: str = "flow_grpo",
    centered: bool = True,
) -> AutoClip:
    return AutoClip(
        DiffusionLossConfig(loss_mode=loss_mode).loss(),
        deviations,
        centered=centered,
        num_steps=6,
        device=torch.device("cpu"),
    )


def observed(seed: int, rows: int = 64) -> tuple[DiffusionBatch, Tensor, GaussianSteps]:
    """Makes a batch, log-probs and steps whose centered log-ratio is normal noise."""
    source = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, 4, generator=source, dtype=torch.float64)
    kl = FLOORS**2 / 2 * torch.ones(rows, 1)
    std = torch.full_like(kl, STD)
    batch = diffusion_batch(torch.zeros(rows, 4).double())
    centered = FLOORS * noise
    return batch, centered - kl, GaussianSteps(std, -std, kl, centered)


def warmed(clip: AutoClip, iterations: int = 8) -> AutoClip:
    for seed in range(iterations):
        clip.observe(*observed(seed))
        clip.finish(identity)
    return clip


def bounds(clip: AutoClip) -> Tensor:
    return clip.bounds(torch.arange(4))


def test_the_bound_is_k_deviations_of_the_step() -> None:
    actual = bounds(warmed(auto_clip()))
    assert torch.allclose(actual, 4 * FLOORS, rtol=0.15)
    # The median of 512 sizes, by hand.
    sizes = torch.cat([torch.expm1(observed(seed)[2].centered[:, 1]).abs() for seed in range(8)])
    ordered = sizes.sort().values
    assert actual[1].item() == pytest.approx(4 * 1.4826 * ordered[255:257].mean().item(), rel=1e-9)


@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "flow_dppo"])
def test_noise_passes_and_ten_floors_do_not(loss_mode: str) -> None:
    """New noise of an engine that nobody calibrated; then the same, moved by ten floors."""
    clip = warmed(auto_clip(loss_mode=loss_mode))
    _, _, gaussian = observed(100, rows=4096)
    at = bounds(clip)
    if loss_mode == "flow_dppo":
        noise = gaussian.kl
        moved = (10 * FLOORS) ** 2 / 2 * torch.ones_like(noise)
    else:
        scale = STD if loss_mode == "grpo_guard" else 1.0
        noise = torch.expm1(scale * gaussian.centered).abs()
        moved = torch.expm1(scale * (gaussian.centered + 10 * FLOORS)).abs()
    assert ((noise > at).double().mean(0) < 0.02).all()
    assert ((moved > at).double().mean(0) > 0.98).all()


def test_plain_log_ratios_are_followed_about_zero() -> None:
    """Their median is below 0 by the KL, and the ratio is clipped about 1 all the same."""
    clip = auto_clip(centered=False)
    batch, log_probs, gaussian = observed(0, rows=1000)
    shift = 3 * FLOORS
    clip.observe(batch, log_probs - shift, gaussian)
    clip.finish(identity)
    sizes = torch.expm1(log_probs - shift).abs().median(0).values
    assert torch.allclose(bounds(clip), 4 * 1.4826 * sizes, rtol=0.01)


def test_nothing_is_bounded_until_a_step_is_warm() -> None:
    clip = auto_clip()
    clip.observe(*observed(0, rows=WARM_UP - 1))
    clip.finish(identity)
    assert (bounds(clip) == math.inf).all()
    clip.observe(*observed(1, rows=1))
    assert (bounds(clip) == math.inf).all()
    clip.finish(identity)
    assert bounds(clip).isfinite().all()
    assert clip.bounds(torch.tensor([4, 5])).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("loss_mode", "reference"), [("flow_grpo", 1e-4), ("grpo_guard", 2e-6), ("flow_dppo", 1e-5)]
)
def test_the_bound_is_never_below_that_of_the_recipe(loss_mode: str, reference: float) -> None:
    batch, log_probs, gaussian = observed(0)
    silent = gaussian._replace(centered=0 * log_probs, kl=0 * log_probs)
    clip = auto_clip(loss_mode=loss_mode)
    clip.observe(batch, 0 * log_probs, silent)
    clip.finish(identity)
    assert bounds(clip).tolist() == [reference] * 4


def test_values_that_are_not_finite_are_left_out() -> None:
    batch, log_probs, gaussian = observed(0, rows=200)
    broken = gaussian.centered.clone()
    broken[:50] = math.nan
    broken[50] = math.inf
    whole, clean = auto_clip(), auto_clip()
    whole.observe(batch, log_probs, gaussian._replace(centered=broken))
    clean.observe(
        diffusion_batch(torch.zeros(149, 4).double()),
        log_probs[51:],
        GaussianSteps(*(fact[51:] for fact in gaussian)),
    )
    for clip in (whole, clean):
        clip.finish(identity)
    assert torch.equal(bounds(whole), bounds(clean))


def test_a_checkpoint_goes_on_with_the_same_bounds() -> None:
    one = warmed(auto_clip(), 3)
    other = auto_clip()
    other.load({name: tensor.clone() for name, tensor in one.tensors().items()})
    assert torch.equal(bounds(one), bounds(other))
    for clip in (one, other):
        for seed in range(3, 3 + MEMORY[0]):
            clip.observe(*observed(seed))
            clip.finish(identity)
    assert torch.equal(bounds(one), bounds(other))


def test_the_loss_clips_each_step_at_its_own_bound() -> None:
    batch, log_probs, gaussian = observed(3, rows=6)
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3, -2.0]).double().unsqueeze(1).expand(6, 4)
    batch = batch.replace(
        old_log_probs=batch.rollout_log_probs, advantages=advantages, loss_bound=FLOORS.expand(6, 4)
    )
    config = LossConfig(
        rollout_correction=RolloutCorrectionConfig(bypass_mode=True, centered=True),
        diffusion_loss=DiffusionLossConfig(clip_ratio="auto:4"),
    )
    value, metrics = diffusion_loss(config, log_probs, batch, gaussian)
    ratio = torch.exp(gaussian.centered)
    expect = [
        clipped(ratio[b, t], advantages[b, t].item(), Clip(FLOORS[t].item(), FLOORS[t].item()))
        for b in range(6)
        for t in range(4)
    ]
    assert value.item() == pytest.approx(torch.stack(expect).mean().item(), rel=1e-12)
    actual = metrics.compute()
    assert 0.1 < actual["clip_fraction"] < 0.6
    assert actual["auto_bound_mean"] == pytest.approx(FLOORS.mean().item())
    assert actual["auto_bound_warm_fraction"] == 1
    with pytest.raises(ValueError, match="loss_bound"):
        diffusion_loss(config, log_probs, batch.replace(loss_bound=None), gaussian)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{CLIP}=auto"], "give a number, or auto:k"),
        ([f"{CLIP}=auto:0"], "give a number, or auto:k"),
        ([f"{CLIP}=auto:x"], "give a number, or auto:k"),
        ([f"{CLIP}=wide"], "give a number, or auto:k"),
        (
            [
                "actor.diffusion_loss.loss_mode=grpo_guard",
                "algorithm.rollout_correction.bypass_mode=false",
            ],
            "set bypass_mode=true",
        ),
        (["actor.diffusion_loss.kl_threshold=auto:4"], "has no effect with"),
        (
            ["actor.diffusion_loss.loss_mode=grpo_guard", "data.replay_dir=/saved"],
            "grows with every update",
        ),
        ([f"{CLIP}=auto:4", f"{MODE}.Strict"], "takes a number and no bound for each step"),
        (
            [f"{CLIP}=1e-3", "actor.diffusion_loss.kl_threshold=auto:4", f"{MODE}.Both"],
            "what kl_threshold bounds",
        ),
        (
            [f"{CLIP}=auto:4", "actor.diffusion_loss.kl_threshold=auto:4", f"{MODE}.Both"],
            "only one option",
        ),
    ],
)
def test_wrong_settings_are_refused(overrides: list[str], message: str) -> None:
    bypass = ["algorithm.rollout_correction.bypass_mode=true"]
    with pytest.raises(ValueError, match=message):
        check_settings(config_of(*bypass, *overrides))


def test_a_loss_that_does_not_say_what_it_clips_gets_a_number() -> None:
    silent = spec_of(f"{MODE}.Silent").settings
    assert silent.actor.diffusion_loss.clip_ratio == 1e-3

"""The rule that turns a mismatch into settings, for each loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compositions import checked_config, config_of, resolved, spec_of

from flowgrpo_rc.calibration.choice import Settings, bound_of, check_modes, choose
from flowgrpo_rc.calibration.measure import Mismatch
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, LossBound, PolicyLoss
from flowgrpo_rc.monitoring.mismatch import round_up
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.spec.check_settings import check_settings


def mismatch(*scales: float) -> Mismatch:
    """Makes normal differences with one standard deviation for each step."""
    normal = torch.distributions.Normal(0.0, 1.0).icdf(torch.arange(1, 20000).double() / 20000)
    return Mismatch(
        guidance=1.0,
        precision="bf16",
        engine=True,
        timesteps=range(len(scales)),
        differences=normal.unsqueeze(1) * torch.tensor(scales).double(),
    )


KEY = "algorithm.rollout_correction"
MODE = f"{KEY}.bypass_mode"
PLAIN = f"{KEY}.centered=false"
CLIP = "actor.diffusion_loss.clip_ratio"
THRESHOLD = "actor.diffusion_loss.kl_threshold"
REINFORCE = [f"{KEY}.loss_type=reinforce", f"{KEY}.bypass_mode=true"]
ALGO = "rollout.algo"
PEERS = [f"{ALGO}.sde_type=cps", f"{ALGO}.log_prob_convention=peers", f"{ALGO}.noise_level=0.8"]
# Standard deviation and KL of the steps.
STD = 0.5
KL = 3e-6


def settings(
    found: Mismatch, *overrides: str, mode: str = "auto", doubt: str | None = None
) -> Settings:
    spec = spec_of(PLAIN, *overrides)
    differences = found.differences
    std = torch.full_like(differences, STD)
    kl = torch.full_like(differences, KL)
    measured = Evaluation(differences, GaussianSteps(std, -std, kl, differences + kl), None)
    return choose(spec, bound_of(spec, differences, measured), mode=mode, doubt=doubt)


def loss_mode(name: str) -> str:
    return f"actor.diffusion_loss.loss_mode={name}"


Z99 = 2.5758  # of |z|
up = partial(round_up, digits=2)


@pytest.mark.parametrize(
    ("scales", "bypass", "clip"),
    [
        ((1e-9, 1e-9), True, 1e-4),  # the reference's band is wide enough
        ((3e-5, 3e-5), True, 1e-4),
        ((1e-4, 1e-4), True, up(1.25 * Z99 * 1e-4)),
        ((3e-4, 3e-4), True, up(1.25 * Z99 * 3e-4)),
        ((4e-4, 4e-4), False, 1e-4),  # ten times the reference
        ((1e-4, 1e-4, 1e-4, 1e-3), False, 1e-4),  # seven floors
    ],
)
def test_mode_and_band_follow_the_rule(
    scales: tuple[float, ...], bypass: bool, clip: float
) -> None:
    found = settings(mismatch(*scales))
    assert (found.values[MODE], found.values[CLIP]) == (bypass, pytest.approx(clip, rel=1e-6))
    assert found.reason.startswith("Bypass mode" if bypass else "Decoupled mode")
    # A centered log-ratio needs no small mismatch.
    assert any("centered=true" in note for note in found.notes) is not bypass
    assert found.values[f"{KEY}.centered"] is False


@pytest.mark.parametrize(
    ("scale", "mode", "doubt", "bypass", "words"),
    [
        (1e-4, "decoupled", None, False, "asked for"),
        (1e-3, "bypass", None, True, "though it is wider"),
        (1e-4, "auto", "the guidance is wrong", False, "since the guidance is wrong"),
        (1e-4, "bypass", "the guidance is wrong", True, "though the guidance is wrong"),
        (1.0, "bypass", None, False, "no clip_ratio below 1"),  # training would refuse such a clip
    ],
)
def test_a_mode_can_be_asked_for_and_a_fault_widens_no_band(
    scale: float, mode: str, doubt: str | None, bypass: bool, words: str
) -> None:
    found = settings(mismatch(scale), mode=mode, doubt=doubt)
    clip = up(1.25 * Z99 * scale) if bypass else 1e-4
    assert (found.values[MODE], found.values[CLIP]) == (bypass, pytest.approx(clip))
    assert words in found.reason


def test_peers_log_probs_have_their_own_band() -> None:
    assert settings(mismatch(1e-9), *PEERS).values[CLIP] == 1e-5
    assert settings(mismatch(1e-4), *PEERS).values[MODE] is False


def test_guard_is_in_bypass_mode_with_a_clip_on_its_own_ratio() -> None:
    """However large the mismatch is. The log-ratio of Guard is (mismatch + KL) std."""
    guard = loss_mode("grpo_guard")
    for scale in (1e-4, 1e-2):
        found = settings(mismatch(scale, scale), guard)
        assert found.values[MODE]
        assert found.values[CLIP] == pytest.approx(up(1.25 * STD * Z99 * scale), rel=1e-6)
        assert settings(mismatch(scale), guard, doubt="it is off").values[MODE] is False
    assert settings(mismatch(1e-9, 1e-9), guard).values[CLIP] == 2e-6
    recomputed = settings(mismatch(1e-4), guard, mode="decoupled")
    assert (recomputed.values[MODE], recomputed.values[CLIP]) == (False, 2e-6)
    assert "centered=true keeps it" in recomputed.notes[0]


def test_centered_is_in_bypass_mode_with_a_clip_on_the_centered_log_ratio() -> None:
    """However large the mismatch is; Guard then adds no KL of its own."""
    centered = f"{KEY}.centered=true"
    for mode, std in (("flow_grpo", 1.0), ("grpo_guard", STD)):
        found = settings(mismatch(1e-2, 1e-2), centered, loss_mode(mode))
        assert found.values[MODE]
        assert found.values[f"{KEY}.centered"] is True
        # The median is the KL, far below the deviation.
        assert found.values[CLIP] == pytest.approx(up(1.25 * std * Z99 * 1e-2), rel=1e-2)
        assert found.notes == []
    doubted = settings(mismatch(1e-2), centered, doubt="the guidance is wrong")
    assert not doubted.values[MODE]
    assert doubted.values[f"{KEY}.centered"] is True


def test_a_clip_that_follows_the_mismatch_gives_way_to_a_number() -> None:
    auto = (f"{CLIP}=auto:4", f"{KEY}.bypass_mode=true")
    found = settings(mismatch(1e-4), *auto)
    assert found.values[CLIP] == pytest.approx(up(1.25 * Z99 * 1e-4))
    for mode in ("auto", "bypass", "decoupled"):
        check_modes(spec_of(*auto), mode)
    group = config_of("+correction=centered")
    assert group.actor.diffusion_loss.auto
    check_modes(resolved(group), "auto")


def test_the_threshold_of_flow_dppo_is_on_the_kl() -> None:
    overrides = (loss_mode("flow_dppo"), "actor.diffusion_loss.clip_ratio=1e-4")
    found = settings(mismatch(1e-4), *overrides)
    assert (found.values[MODE], found.values[THRESHOLD], CLIP in found.values) == (
        True,
        1e-5,
        False,
    )
    spec = spec_of(PLAIN, *overrides)
    differences = mismatch(1e-4).differences
    for kl, bypass, threshold in ((4e-5, True, 5e-5), (1e-4, False, 1e-5)):
        gaussian = GaussianSteps(torch.ones(1), torch.ones(1), torch.full_like(differences, kl))
        bound = bound_of(spec, differences, Evaluation(differences, gaussian, None))
        chosen = choose(spec, bound, mode="auto", doubt=None)
        assert (chosen.values[MODE], chosen.values[THRESHOLD]) == (
            bypass,
            pytest.approx(threshold, rel=0.03),
        )


class Unbounded(DiffusionLoss):
    """Names no bound."""

    def __call__(self, *given: Any) -> PolicyLoss:
        raise NotImplementedError


class Wide(Unbounded):
    """Bounds the mismatch by an option of its own."""

    def __init__(self, *, width: float = 1e-3) -> None:
        self.width = width

    def bound(
        self, mismatch: torch.Tensor, gaussian: GaussianSteps | None, *, convention: str
    ) -> LossBound:
        return LossBound("width", self.width, 1e-4, "it", mismatch)


def own(cls: type) -> tuple[str, str]:
    return loss_mode(f"{__name__}.{cls.__name__}"), f"{CLIP}=1e-4"


def test_without_a_bound_only_mode_and_bands_are_set() -> None:
    for mode, doubt in (("auto", None), ("bypass", "it is off"), ("decoupled", None)):
        found = settings(mismatch(1e-4), *own(Unbounded), mode=mode, doubt=doubt)
        assert found.values[MODE] is (mode == "bypass")
        assert not any(key.startswith("actor.diffusion_loss") for key in found.values)
        assert found.values[f"{KEY}.rollout_rs_threshold"] == "auto:4"
        assert any("it is off" in note for note in found.notes) is (doubt is not None)
        check_settings(resolved(found.applied(config_of(*own(Unbounded)))))


def test_the_bound_may_be_an_option_of_the_loss_itself(tmp_path: Path) -> None:
    found = settings(mismatch(1e-4), *own(Wide))
    width = pytest.approx(up(1.25 * Z99 * 1e-4))
    assert found.values["actor.diffusion_loss.width"] == width
    assert found.applied(config_of(*own(Wide))).actor.diffusion_loss.options == {"width": width}
    assert composed_with(found, tmp_path, *own(Wide)) == found.applied(config_of(*own(Wide)))


def test_reinforce_has_its_mode_and_no_clip() -> None:
    for doubt in (None, "it is off"):
        found = settings(mismatch(1e-2), *REINFORCE, doubt=doubt)
        assert (found.values[MODE], CLIP in found.values) == (True, False)
        check_settings(resolved(found.applied(config_of(*REINFORCE))))
    with pytest.raises(ValueError, match="--mode decoupled"):
        check_modes(spec_of(*REINFORCE), "decoupled")


BYPASS = f"{KEY}.bypass_mode=true"
DECOUPLED = f"{KEY}.bypass_mode=false"
WEIGHTS = f"{KEY}.rollout_is=token"


@pytest.mark.parametrize(
    ("first", "setting", "value"),
    [
        (DECOUPLED, f"{KEY}.exclude_rejected=true", None),
        (f"{DECOUPLED} {WEIGHTS}", f"{KEY}.rollout_is_batch_normalize=true", False),
        (f"{DECOUPLED} {WEIGHTS}", f"{KEY}.rollout_is_mode=mask", None),
        (BYPASS, f"{KEY}.bypass_level=window", "step"),
    ],
)
def test_settings_that_the_chosen_mode_refuses_are_changed(
    first: str, setting: str, value: object
) -> None:
    given = [*first.split(), setting]
    key = setting.partition("=")[0]
    mode, other = ("decoupled", "bypass") if first == BYPASS else ("bypass", "decoupled")
    config = config_of(*given)
    check_modes(resolved(config), "auto")
    found = settings(mismatch(1e-4), *given, mode=mode)
    assert key in found.values
    assert found.values[key] == value
    assert any(note.startswith(f"{key}=") and mode in note for note in found.notes)
    check_settings(resolved(found.applied(config)))
    # The configuration is in the other mode already.
    assert key not in settings(mismatch(1e-4), *given, mode=other).values


def composed_with(found: Settings, folder: Path, *overrides: str) -> Config:
    """Composes with the file that a calibration writes."""
    (folder / "calibration").mkdir()
    (folder / "calibration" / "measured.yaml").write_text(found.yaml(["A header."]))
    given = [*overrides, "+calibration=measured"]
    return checked_config(compose_config(given, config_dir=str(folder)))


def test_the_file_says_what_is_applied(tmp_path: Path) -> None:
    found = settings(mismatch(1e-4), DECOUPLED, f"{KEY}.exclude_rejected=true", mode="bypass")
    assert composed_with(found, tmp_path) == found.applied(config_of())

"""From settings to a loss: names, options, what is refused, and losses out of the tree."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.builders import diffusion_batch
from support.compositions import checked_config, resolved
from torch import Tensor

from flowgrpo_rc import (
    DiffusionLossConfig,
    LossConfig,
    RolloutCorrectionConfig,
    apply_bypass_mode,
    diffusion_loss,
)
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.transition import GaussianSteps
from flowgrpo_rc.losses.base import DiffusionLoss, PolicyLoss, TokenLoss
from flowgrpo_rc.records.run_folder import RunFolder

HERE = __name__
LOSS = "actor.diffusion_loss"
CLIP = "actor.diffusion_loss.clip_ratio=1e-3"
TOKENS = "actor.token_loss"


@dataclass(frozen=True, kw_only=True)
class Scaled(DiffusionLoss):
    """-factor A (log_prob - old): out of the tree, with an option of its own and a shared one."""

    clip_ratio: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor={self.factor}: give a number above 0")

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        keep_mask: Tensor,
        gaussian: GaussianSteps | None,
    ) -> PolicyLoss:
        values = -self.factor * advantages * (log_probs - old_log_probs)
        return PolicyLoss(torch.where(keep_mask, values, 0.0), MetricBag())


class Demanding(DiffusionLoss):
    """An option without a default, and none of the shared ones."""

    def __init__(self, *, needed: int) -> None:
        self.needed = needed

    def __call__(self, *given: Any) -> PolicyLoss:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Lower(TokenLoss):
    """Reads one of the shared options."""

    clip_ratio_low: float
    further: int = 1

    def __call__(self, *given: Any) -> PolicyLoss:
        raise NotImplementedError


OWN = f"{HERE}.Scaled"
DEMANDING = f"{HERE}.Demanding"


def composed(*overrides: str, **options: str) -> Config:
    return checked_config(compose_config(list(overrides), **options))


def test_a_loss_out_of_the_tree_gets_shared_and_own_options() -> None:
    section = DiffusionLossConfig(loss_mode=OWN, clip_ratio=0.2, options={"factor": 3.0})
    section.validate()
    assert section.loss() == Scaled(clip_ratio=0.2, factor=3.0)
    assert DiffusionLossConfig(loss_mode=OWN).loss() == Scaled(clip_ratio=1e-4)
    assert not section.loss().needs_means


def test_its_own_options_are_keys_of_the_command_line() -> None:
    config = composed(CLIP, f"{LOSS}.loss_mode={OWN}", f"+{LOSS}.factor=2.5")
    assert config.actor.diffusion_loss.options == {"factor": 2.5}
    assert config.actor.diffusion_loss.loss() == Scaled(clip_ratio=1e-3, factor=2.5)
    assert resolved(config).clip_ratio is None


def test_its_own_options_are_keys_of_files(tmp_path: Path) -> None:
    """A file, a group of the command line, and the whole section at once."""
    section = f"actor: {{diffusion_loss: {{loss_mode: {OWN}, factor: 2.0}}}}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [tiny_ocr, _self_]\n{section}")
    (tmp_path / "study").mkdir()
    group = "# @package _global_\nactor: {diffusion_loss: {factor: 4.0}}\n"
    (tmp_path / "study" / "four.yaml").write_text(group)
    given = {"config_name": "mine", "config_dir": str(tmp_path)}
    assert composed(**given).actor.diffusion_loss.options == {"factor": 2.0}
    assert composed("+study=four", **given).actor.diffusion_loss.options == {"factor": 4.0}
    whole = composed(f"{LOSS}={{loss_mode: {OWN}, factor: 5.0}}").actor.diffusion_loss
    assert (whole.options, whole.clip_ratio) == ({"factor": 5.0}, "auto:16")
    assert composed(f"{LOSS}.factor=6", **given).actor.diffusion_loss.options == {"factor": 6}


def test_a_loss_of_text_has_options_too() -> None:
    given = (f"{TOKENS}.loss_mode={HERE}.Lower", f"{TOKENS}.further=3")
    config = composed(*given, config_name="token_grpo")
    assert config.actor.token_loss.loss() == Lower(clip_ratio_low=0.2, further=3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{LOSS}.clip_ration=1"], [f"{LOSS}.clip_ration", "did you mean 'clip_ratio'"]),
        ([f"{LOSS}.factor=2"], [f"{LOSS}.factor", "loss_mode=flow_grpo", "adv_clip_max"]),
        ([f"{LOSS}.loss_mode={OWN}", f"{LOSS}.facter=2"], ["did you mean 'factor'"]),
        ([f"{LOSS}.loss_mode={OWN}", f"{LOSS}.factor=-2"], [LOSS, "factor=-2", "above 0"]),
        ([f"{LOSS}.loss_mode={DEMANDING}"], [LOSS, "needs the option needed"]),
        (
            [CLIP, f"{LOSS}.loss_mode={DEMANDING}", f"{LOSS}.needed=1"],
            [f"{LOSS}.clip_ratio=0.001 has no effect", "drop it", "flow_grpo or grpo_guard"],
        ),
        ([f"{LOSS}.kl_threshold=1e-3"], ["kl_threshold=0.001 has no effect", "flow_dppo"]),
        ([f"{LOSS}.kl_threshold=0"], [f"{LOSS}.kl_threshold=0", "above 0"]),
        ([CLIP, f"{LOSS}.loss_mode=flow_dppo"], ["clip_ratio=0.001 has no effect", "drop it"]),
        ([f"{LOSS}.loss_mode=ppo_clip"], ["'ppo_clip'", "flow_dppo, flow_grpo, grpo_guard"]),
        ([f"{LOSS}.loss_mode={HERE}.Lower"], [f"{LOSS}.loss_mode", "not a subclass"]),
        ([f"{LOSS}.loss_mode={HERE}:plain"], [f"{LOSS}.loss_mode", "my_module.MyLoss"]),
        ([f"{LOSS}=null"], [LOSS]),
        ([f"{LOSS}.clip_ratio=many"], [f"{LOSS}.clip_ratio", "many"]),
        ([f"{TOKENS}.clip_ratio_lo=0.1"], [f"{TOKENS} is set", "model.kind=diffusion"]),
    ],
)
def test_what_is_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"actor\.(diffusion|token)_loss") as error:
        composed(*overrides)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(("name", "value"), [("clip_ratio", 1.0), ("adv_clip_max", 0.0)])
def test_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    for number in (value, -1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"{LOSS}\.{name}={number}: give a number"):
            DiffusionLossConfig(**{name: number}).validate()


def test_settings_without_effect_are_refused_by_the_check_alone() -> None:
    """In Python a section may hold both bounds and be tried with every loss."""
    section = DiffusionLossConfig(loss_mode="flow_dppo", clip_ratio=0.1, kl_threshold=1e-3)
    assert vars(section.loss()) == {"kl_threshold": 1e-3}
    with pytest.raises(ValueError, match="clip_ratio"):
        section.validate()


def test_the_loss_is_built_once() -> None:
    """What changes in the settings afterwards changes nothing in a run that has begun."""
    correction = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=2.0
    )
    section = DiffusionLossConfig(clip_ratio=0.5)
    rollout = torch.zeros(2, 2, dtype=torch.float64)
    batch = apply_bypass_mode(diffusion_batch(rollout, advantages=torch.ones_like(rollout)))
    config = LossConfig(rollout_correction=correction, diffusion_loss=section)
    objective = DiffusionObjective(config)
    before = objective.terms(rollout + 0.1, batch).total
    section.loss_mode = "my_lost.Loss"
    section.clip_ratio = 0.01
    correction.rollout_rs_threshold = "0.5_1.01"
    assert objective.terms(rollout + 0.1, batch).total == before
    with pytest.raises(ValueError, match=r"loss_mode: my_lost\.Loss"):
        diffusion_loss(config, rollout, batch)


# A run's folder


def test_options_are_stored_and_compared(tmp_path: Path) -> None:
    config = composed(CLIP, f"{LOSS}.loss_mode={OWN}", f"{LOSS}.factor=2.0")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
    stored = stored_config(path)
    assert stored == config
    assert stored.actor.diffusion_loss.loss() == Scaled(clip_ratio=1e-3, factor=2.0)
    other = composed(CLIP, f"{LOSS}.loss_mode={OWN}", f"{LOSS}.factor=3.0")
    with pytest.raises(ValueError, match=rf"{LOSS}.options.factor: 2.0 there, 3.0 now"):
        RunFolder(tmp_path).check_same_run(
            dataclasses.asdict(stored), dataclasses.asdict(other), {}
        )

"""`bypass_level=window`: criteria and weights of sequences see the whole window in bypass mode."""

import pytest
import torch
from support.builders import loss_config
from support.costs import Counting
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import iterate, mode_of, update_of
from torch import Tensor

from flowgrpo_rc import diffusion_loss
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.correct import Corrector
from flowgrpo_rc.losses.config import LossConfig
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.policies.base import join
from flowgrpo_rc.training.update import PolicyUpdate

# One sample is off at one step by 3e-4, so that its window is off by 1e-4 on average.
FAULT = 3e-4
ROW = 2
STEP = 1
MEAN_BAND = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99995_1.00005"}


class Setting:
    """Trajectories of an fp32 rollout, one with a faulty log-prob, and updates that hardly move
    the policy.
    """

    def __init__(self, model: FlowModel, window: str = "all") -> None:
        self.policy = Counting(model, trained_lora(model))
        spec = make_spec("sde", 1.0)
        batch, _ = sample_images(model, self.policy.network, spec, WINDOWS[window], keep_means=True)
        faulty = batch.rollout_log_probs.clone()
        faulty[ROW, STEP] += FAULT
        advantages = torch.tensor([1.0, -1.0, 2.0, -0.5]).unsqueeze(1).expand(4, batch.num_steps)
        self.batch = batch.replace(
            rollout_log_probs=faulty, old_log_probs=faulty, advantages=advantages
        )

    def update(self, config: LossConfig, bands: AutoBands | None = None) -> PolicyUpdate:
        self.mode = mode_of(
            config.rollout_correction,
            self.policy,
            auto_bands=bands,
            terms=DiffusionObjective(config).terms,
        )
        return update_of(self.mode, lr=1e-12)

    def gradient(self, config: LossConfig, micro: int = 4) -> tuple[list[Tensor], dict[str, float]]:
        """Returns what the update accumulates before its division, with micro-batches of
        `micro`.
        """
        update = self.update(config)
        self.mode.micro_batch_size = micro
        bag = MetricBag()
        self.mode.loss(self.batch, lambda forward: forward.total.backward(), bag, updates=0)
        return [p.grad.clone() for p in update.parameters if p.grad is not None], bag.compute()


def by_autograd(setting: Setting, config: LossConfig, batch: DiffusionBatch) -> list[Tensor]:
    """Returns the gradient of one graph of all steps: the library's loss times its denominator."""
    steps = [setting.policy.evaluate(batch.step(t)) for t in range(batch.num_steps)]
    now = join(steps, dim=1)
    loss, _ = diffusion_loss(config, now.log_probs, batch, now.gaussian)
    parameters = setting.update(config).parameters
    return [
        g * batch.step_mask.sum()
        for g in torch.autograd.grad(loss, parameters, allow_unused=True)
        if g is not None
    ]


CASES = {
    "clip": MEAN_BAND,
    "reinforce": MEAN_BAND | {"loss_type": "reinforce", "rollout_is": "sequence"},
    "geometric": {
        "loss_type": "reinforce",
        "rollout_is": "geometric",
        "rollout_is_threshold": "0.9999_1.00005",
    },
    "veto": {"rollout_token_veto_threshold": 0.9998},
    "centered": MEAN_BAND | {"centered": True},
}


@pytest.mark.parametrize(("case", "micro"), [*zip(CASES, [4, 1, 4, 1, 4], strict=True)])
def test_the_gradient_is_that_of_one_graph_of_all_steps(
    model: FlowModel, case: str, micro: int
) -> None:
    setting = Setting(model)
    correction = RolloutCorrectionConfig(bypass_mode=True, bypass_level="window", **CASES[case])
    correction.validate()
    config = loss_config(correction)
    actual, metrics = setting.gradient(config, micro)
    expect = by_autograd(setting, config, setting.batch)
    assert len(actual) == len(expect) > 0
    size = max(gradient.abs().max().item() for gradient in expect)
    for one, other in zip(actual, expect, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * size)
    # The metrics are those of whole trajectories.
    old = setting.policy.log_probs(setting.batch, micro)
    known = Corrector(correction)(old, setting.batch.rollout_log_probs, setting.batch.step_mask)
    corrected = {f"rollout_corr/{n}": value for n, value in known.metrics.compute().items()}
    ours = {name: metrics[name] for name in corrected}
    assert ours == pytest.approx(corrected, rel=1e-9, abs=1e-13)
    assert metrics["rollout_corr/chi2_seq"] != metrics["rollout_corr/chi2_token"]


def test_a_fault_at_one_step_rejects_the_trajectory(model: FlowModel) -> None:
    """By step only the faulty one is rejected; by window its whole sample is, as in decoupled
    mode.
    """
    setting = Setting(model)
    number = setting.batch.num_steps
    rejected = {}
    for level in ("step", "window"):
        correction = RolloutCorrectionConfig(bypass_mode=True, bypass_level=level, **MEAN_BAND)
        actual = setting.update(loss_config(correction)).run(setting.batch, 4).compute()
        rejected[level] = actual["rollout_corr/rollout_rs_masked_fraction"]
    assert rejected == {"step": 1 / (4 * number), "window": number / (4 * number)}


@pytest.mark.parametrize(
    ("window", "level", "forwards"),
    [("all", "step", 4), ("all", "window", 8), ("one", "window", 1)],
)
def test_a_window_costs_one_more_forward_of_each_step(
    model: FlowModel, monkeypatch: pytest.MonkeyPatch, window: str, level: str, forwards: int
) -> None:
    """There is none if the window is a single step."""
    monkeypatch.setitem(WINDOWS, "one", [[1]])
    monkeypatch.setattr(f"{__name__}.STEP", 0)
    setting = Setting(model, window)
    correction = RolloutCorrectionConfig(bypass_mode=True, bypass_level=level)
    setting.update(loss_config(correction)).run(setting.batch, 4)
    assert setting.policy.forwards == forwards


def test_bands_that_know_the_scale_judge_trajectories(model: FlowModel) -> None:
    """The mean of a window is judged by the spread of such means.

    By step, the fault is ten deviations.
    """
    setting = Setting(model)
    rules = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto:4"}
    spread = FAULT / 4 / 10
    past = (
        torch.distributions.Normal(0.0, spread)
        .icdf(torch.arange(1, 400).double() / 400)
        .reshape(-1, 1)
    )
    rejected = {}
    for level in ("step", "window"):
        correction = RolloutCorrectionConfig(bypass_mode=True, bypass_level=level, **rules)
        bands = AutoBands(correction.rules().auto, 5, torch.device("cpu"))
        rows = setting.batch.select(torch.zeros(len(past), dtype=torch.int64))
        for t in range(setting.batch.num_steps):
            step = rows.step(t).replace(rollout_log_probs=torch.zeros_like(past))
            bands.judge(step, past, None)
        bands.finish(lambda rows: rows)
        update = setting.update(loss_config(correction), bands)
        actual = iterate(update, setting.mode, setting.batch, 4)
        rejected[level] = actual["rollout_corr/rollout_rs_masked_fraction"]
    assert rejected == {"step": 1 / 16, "window": 4 / 16}

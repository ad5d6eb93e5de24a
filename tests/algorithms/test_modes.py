"""Decoupled mode without a recompute: forwards of the first mini-batch give old log-probs."""

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.compositions import resolved
from support.costs import Counting
from support.image_rollouts import WINDOWS, make_spec, sample_images, trained_lora
from support.modes import mode_of, update_of
from support.text_rollouts import perturb, sample_texts
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.algorithms.policy_gradient.images import DiffusionObjective
from flowgrpo_rc.algorithms.policy_gradient.text import TokenObjective
from flowgrpo_rc.batch import Batch, DiffusionBatch, TokenSpec
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction import auto_bands
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.recompute import why_recompute
from flowgrpo_rc.losses.config import DiffusionLossConfig, LossConfig, TokenLossConfig
from flowgrpo_rc.models.base import ModelConfig, load_model
from flowgrpo_rc.models.causal_lm import load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.base import Evaluation, Policy
from flowgrpo_rc.policies.token import TokenPolicy

RC = "algorithm.rollout_correction"


class Run(NamedTuple):
    """What an iteration leaves: every gradient, the LoRA, the metrics, the scales of `auto`
    bands.
    """

    gradients: list[Tensor]
    lora: dict[str, Tensor]
    metrics: dict[str, float]
    scales: list[Tensor]


def iterate(
    policy: Policy[Any],
    batch: Batch,
    config: LossConfig,
    *,
    own_forwards: bool,
    mini: int,
    bands: AutoBands | None = None,
    **actor: Any,
) -> Run:
    """Runs one iteration from the same weights and bands.

    The learning rate moves the policy far.
    """
    start = {name: p.detach().clone() for name, p in lora_parameters(policy.network).items()}
    bands = copy.deepcopy(bands)
    correction = config.rollout_correction
    objective = TokenObjective if isinstance(policy, TokenPolicy) else DiffusionObjective
    mode = mode_of(
        correction,
        policy,
        micro_batch_size=2,
        auto_bands=bands,
        own_forwards=own_forwards,
        keep_means=config.diffusion_loss.loss().needs_means,
        terms=objective(config).terms,
    )
    update = update_of(mode, lr=1e-2, **actor)
    gradients: list[Tensor] = []
    hooks = [
        p.register_hook(lambda gradient: gradients.append(gradient.clone()))
        for p in update.parameters
    ]
    bag = update.run(mode.begin(batch, 1), mini)
    mode.finish(bag)
    scales = [part for band in correction.rules().auto for part in bands.scale(band.name)]
    lora = {name: p.clone() for name, p in update.lora_state().items()}
    actual = Run(gradients, lora, bag.compute(), scales)
    for hook in hooks:
        hook.remove()
    for name, parameter in lora_parameters(policy.network).items():
        parameter.data.copy_(start[name])
    return actual


def assert_same(own: Run, recomputed: Run, *, rejects: bool) -> None:
    """Gradients and weights are bitwise the same.

    Metrics agree to rounding: their sums have another order.
    """
    assert len(own.gradients) > 0
    for mine, theirs in (
        (own.gradients, recomputed.gradients),
        (own.lora.values(), recomputed.lora.values()),
        (own.scales, recomputed.scales),
    ):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    assert own.metrics == pytest.approx(recomputed.metrics, rel=1e-9, abs=1e-13)
    measured = {
        name.removeprefix("rollout_corr/"): value for name, value in recomputed.metrics.items()
    }
    assert measured["rollout_is_max"] > measured["rollout_is_min"]
    assert (0 < measured["rollout_rs_masked_fraction"] < 1) == rejects
    assert recomputed.metrics["grad_norm"] > 0


TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 1.00005}  # cuts some of the weights
REJECTS = {
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.9999_1.00002",
    "exclude_rejected": False,
}
AUTO = REJECTS | {
    "rollout_rs": "token_k1,token_k2,step_kl",
    "rollout_rs_threshold": ["auto:1", 1e-8, "auto:1"],
}
ONE_STEP = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 1e-9}

# settings of the correction and of the loss, the window, the actor's
IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "nothing": ({}, {}, "first", {"use_kl_loss": True}),
    "weights": (TOKEN_IS | {"metric_names": "both"}, {}, "first", {}),
    "kept": (TOKEN_IS | REJECTS | {"normalize": "kept"}, {}, "first", {"ppo_epochs": 2}),
    "step_kl": (REJECTS | {"rollout_rs": "step_kl", "rollout_rs_threshold": 1e-5}, {}, "all", {}),
    "auto": (TOKEN_IS | AUTO, {}, "per_sample", {"ppo_epochs": 2}),
    "guard": (TOKEN_IS, {"loss_mode": "grpo_guard"}, "first", {"ppo_epochs": 2}),
    "dppo_sum": (TOKEN_IS | {"log_prob_scale": "sum"}, {"loss_mode": "flow_dppo"}, "first", {}),
    "centered": (TOKEN_IS | {"centered": True}, {}, "first", {"ppo_epochs": 2}),
    "centered_guard": (TOKEN_IS | {"centered": True}, {"loss_mode": "grpo_guard"}, "first", {}),
    "one_step": (ONE_STEP | {"exclude_rejected": False}, {}, "one", {"ppo_epochs": 2}),
}


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Counting:
    """One policy for all tests of a file; `iterate` undoes what an iteration does to it."""
    model = load_model(ModelConfig(path=str(checkpoint)), torch.device("cpu"))
    return Counting(model, trained_lora(model))


@pytest.mark.parametrize(("case", "mini"), [*((case, 2) for case in IMAGES), ("weights", 4)])
def test_own_forwards_are_the_recompute_bit_for_bit(
    policy: Counting, monkeypatch: pytest.MonkeyPatch, case: str, mini: int
) -> None:
    """The rollout is bf16 and the training fp32, so there is something to correct; one or two
    mini-batches.
    """
    settings, loss_settings, window, actor = IMAGES[case]
    monkeypatch.setitem(WINDOWS, "one", [[1]])
    correction = RolloutCorrectionConfig(**settings)
    assert why_recompute(correction, correction.rules(), sees_rows=window == "one") is None
    config = LossConfig(
        rollout_correction=correction,
        diffusion_loss=DiffusionLossConfig(clip_ratio=1e-2, **loss_settings),
    )
    keep_means = correction.rules().needs_means or bool(correction.centered)
    spec = make_spec("sde", 1.0, dtype="bf16")
    batch, _ = sample_images(
        policy.model, policy.network, spec, WINDOWS[window], keep_means=keep_means
    )
    batch = batch.replace(
        advantages=torch.tensor([1.0, -1.0, 2.0, -0.5]).unsqueeze(1).expand(4, batch.num_steps)
    )
    bands = None
    if auto := correction.rules().auto:  # warm by what another rollout of these weights was off by
        monkeypatch.setattr(auto_bands, "WARM_UP", 2)
        bands = AutoBands(auto, 5, torch.device("cpu"))
        seen = policy.measure(batch, 2)
        bands.judge(batch, 0.9 * seen.log_probs + 0.1 * batch.rollout_log_probs, 0.9 * seen.step_kl)
        bands.finish(identity)
    runs = []
    forwards = []
    for own in (True, False):
        policy.forwards = 0
        runs.append(
            iterate(policy, batch, config, own_forwards=own, mini=mini, bands=bands, **actor)
        )
        forwards.append(policy.forwards)
    assert_same(*runs, rejects=correction.rollout_rs is not None)
    assert forwards[1] - forwards[0] == mini // 2 * batch.num_steps  # those of the first mini-batch


TEXT: dict[str, dict[str, Any]] = {
    "sequences": {
        "rollout_is": "sequence",
        "rollout_rs": "seq_sum_k1,seq_max_k2",
        "rollout_rs_threshold": ["0.8_1.2", 1e-2],
        "exclude_rejected": False,
    },
    "veto": {
        "rollout_is": "geometric",
        "rollout_token_veto_threshold": 0.99,
        "exclude_rejected": False,
    },
}


@pytest.mark.parametrize("case", TEXT)
def test_own_forwards_of_text_are_the_recompute_bit_for_bit(case: str) -> None:
    """A forward sees whole responses, so it can judge sequences as well."""
    correction = RolloutCorrectionConfig(**TEXT[case])
    assert why_recompute(correction, correction.rules(), sees_rows=True) is None
    settings = ModelConfig(kind="causal_lm", path=str(assets.path("tiny_adder_lm")), lora_rank=4)
    language = load_causal_lm(settings, torch.device("cpu"))
    policy = TokenPolicy(language, add_lora(language, settings, seed=0))
    perturb(policy.network)
    spec = TokenSpec(dtype="bf16", temperature=1.0, prompt_length=8, response_length=6)
    batch, _ = sample_texts(language, spec, chunk=2)
    assert not batch.response_mask.all()
    advantages = torch.randn(len(batch), 1, generator=torch.Generator().manual_seed(0)).expand(
        -1, batch.num_steps
    )
    config = LossConfig(
        rollout_correction=correction,
        token_loss=TokenLossConfig(loss_agg_mode="seq-mean-token-mean"),
    )
    batch = batch.replace(advantages=advantages)
    runs = (
        iterate(policy, batch, config, own_forwards=own, mini=4, ppo_epochs=2)
        for own in (True, False)
    )
    assert_same(*runs, rejects=True)


class Noisy(Counting):
    """A policy of which no two forwards agree."""

    def evaluate(self, batch: DiffusionBatch) -> Evaluation:
        actual = super().evaluate(batch)
        return actual._replace(log_probs=actual.log_probs + 1e-5 * self.forwards)


def test_the_first_ratio_is_exactly_1(policy: Counting) -> None:
    """This holds even if forwards with and without a graph differ, as they may on other devices."""
    noisy = Noisy(policy.model, policy.network)
    batch, _ = sample_images(policy.model, policy.network, make_spec("sde", 1.0), WINDOWS["first"])
    batch = batch.replace(advantages=torch.ones(4, 2))
    config = LossConfig(rollout_correction=RolloutCorrectionConfig(**TOKEN_IS))
    for own_forwards in (True, False):
        actual = iterate(noisy, batch, config, own_forwards=own_forwards, mini=4).metrics
        assert (actual["ratio_mean"] == 1) == (actual["ratio_std"] == 0) == own_forwards


@pytest.mark.parametrize("own_forwards", [True, False])
def test_a_rollout_that_is_not_finite_leaves_the_baseline_at_once(
    policy: Counting, own_forwards: bool
) -> None:
    batch, _ = sample_images(policy.model, policy.network, make_spec("sde", 1.0), WINDOWS["first"])
    batch.rollout_log_probs[0] = math.nan
    batch.rollout_log_probs[1, 0] = math.inf
    mode = mode_of(RolloutCorrectionConfig(), policy, micro_batch_size=2, own_forwards=own_forwards)
    actual = mode.begin(batch, 1).rejection_mask
    assert actual.tolist() == [[False, False], [False, True], [True, True], [True, True]]


# --- Where it may be

BOUNDED = TOKEN_IS | {"rollout_is_threshold": "0.9_1.1"}
FOLLOWS = REJECTS | {"rollout_rs_threshold": "auto:4"}


@pytest.mark.parametrize(
    ("settings", "sees_rows", "word"),
    [
        ({}, False, None),
        (BOUNDED | {"rollout_is_mode": "clip"}, False, None),
        (REJECTS, False, None),
        (REJECTS | {"exclude_rejected": None}, True, "exclude_rejected=false"),
        (BOUNDED | {"rollout_is_mode": "mask"}, True, "exclude_rejected=false"),
        ({"rollout_token_veto_threshold": 1e-4}, True, "exclude_rejected=false"),
        (TOKEN_IS | {"rollout_is_batch_normalize": True}, True, "rollout_is_batch_normalize"),
        (FOLLOWS, False, None),
        (FOLLOWS | {"exclude_rejected": None}, True, "exclude_rejected=false"),
        (FOLLOWS | {"rollout_rs": "seq_mean_k1"}, False, "all steps"),
        (FOLLOWS | {"rollout_rs": "seq_mean_k1"}, True, None),
        ({"custom_correction": "support.builders:drop_odd"}, True, "custom_correction"),
        ({"rollout_is": "sequence"}, False, "all steps"),
        ({"rollout_is": "geometric"}, False, "all steps"),
        ({"rollout_is": "geometric"}, True, None),
        (REJECTS | {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.1}, False, "all steps"),
        ({"rollout_token_veto_threshold": 1e-4, "exclude_rejected": False}, False, "all steps"),
    ],
)
def test_why_old_log_probs_are_recomputed(
    settings: dict[str, Any], sees_rows: bool, word: str | None
) -> None:
    correction = RolloutCorrectionConfig(**settings)
    correction.validate()
    actual = why_recompute(correction, correction.rules(), sees_rows=sees_rows)
    assert (actual is None) == (word is None)
    assert word is None or word in actual


def test_the_window_decides_what_a_forward_sees() -> None:
    config = Config()
    config.model.path = "a/b"
    config.algorithm.rollout_correction = RolloutCorrectionConfig(rollout_is="sequence")
    assert "all steps" in resolved(config).why_recompute
    config.rollout.algo.sde_window_size = 1
    assert resolved(config).why_recompute is None

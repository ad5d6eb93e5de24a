"""Each row of the table of rules refuses a setting, in words that name what goes with what."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import pytest
from support.compositions import checked_config, config_of, job, resolved
from torch import Tensor

from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.config.tree import Config, known_keys
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.losses.flow_grpo import FlowGRPO
from flowgrpo_rc.spec.rules import check_rules, refusals, rules
from flowgrpo_rc.spec.run_spec import RunSpec

RC = "algorithm.rollout_correction"
LOSS = "actor.diffusion_loss"
FILTER = "algorithm.filter_groups.enable=true"
SIZE = "rollout.algo.sde_window_size"
ODE = "rollout.algo.noise_level=0.7 rollout.algo.sde_window_range=null rollout.algo.tail_steps=null"
ODE += " rollout.algo.shared_prefix=false"
REPLAY = "data.replay_dir=x"
BATCH = f"{RC}.rollout_is=token {RC}.rollout_is_batch_normalize=true"

# A job, settings that go beside it, the condition that they break, and further words.
EXAMPLES = [
    ("steps", f"{ODE} {SIZE}=0", f"{SIZE}=0", "no stochastic step is left"),
    ("nft", f"{SIZE}=3", f"{SIZE}=0", "it is 3"),
    ("nft", f"{SIZE}=null", f"{SIZE}=0", "it is null"),
    ("nft", f"{LOSS}.options={{times: 11}}", "more_times_than_levels", "times=11 of 10 noise lev"),
    ("nft", f"{LOSS}.adv_clip_max=.inf", f"{LOSS}.adv_clip_max=inf", "give a number"),
    ("nft", f"{RC}.bypass_mode=true", f"{RC}.bypass_mode", f"file sets it, {RC}.bypass_mode=false"),
    ("nft", f"{RC}.loss_type=reinforce {RC}.bypass_mode=true", f"{RC}.loss_type", "no log-probs"),
    ("nft", f"{RC}.rollout_is=token", f"{RC}.rollout_is", f"sets it, {RC}.rollout_is=null"),
    ("nft", f"{RC}.rollout_is=token {RC}.rollout_is_mode=clip", f"{RC}.rollout_is_mode", "=clip"),
    ("nft", f"{RC}.rollout_is_threshold=3", f"{RC}.rollout_is_threshold", "=2.0"),
    ("nft", BATCH, f"{RC}.rollout_is_batch_normalize", "=true has no effect"),
    ("nft", f"{RC}.rollout_rs=token", f"{RC}.rollout_rs", "=token has no effect"),
    (
        "nft",
        f"{RC}.rollout_rs=token {RC}.rollout_rs_threshold=2",
        f"{RC}.rollout_rs_threshold",
        "=2 has no effect",
    ),
    (
        "nft",
        f"{RC}.rollout_rs=token {RC}.rollout_rs_threshold_lower=0.5",
        f"{RC}.rollout_rs_threshold_lower",
        "=0.5 has no effect",
    ),
    ("nft", f"{RC}.rollout_token_veto_threshold=0.1", f"{RC}.rollout_token_veto_threshold", "=0.1"),
    ("nft", f"{RC}.normalize=kept", f"{RC}.normalize", "=kept has no effect"),
    ("nft", f"{RC}.exclude_rejected=true", f"{RC}.exclude_rejected", "=true has no effect"),
    ("nft", f"{RC}.bypass_mode=true {RC}.bypass_level=window", f"{RC}.bypass_level", "=window"),
    ("nft", f"{RC}.rollout_is=token {RC}.log_prob_scale=sum", f"{RC}.log_prob_scale", "=sum"),
    ("nft", f"{RC}.metric_names=both", f"{RC}.metric_names", "=both has no effect"),
    (
        "nft",
        f"{RC}.custom_correction=support.builders:drop_odd",
        f"{RC}.custom_correction",
        "has no effect",
    ),
    ("nft", f"{RC}.centered=true", f"{RC}.centered", "knows no log-probs"),
    ("nft", REPLAY, "data.replay_dir", "finished samples"),
    ("nft", "trainer.save_rollouts=true", "trainer.save_rollouts", "finished samples"),
    ("nft", "actor.steps_per_forward=4", "more_steps_than_trained", "=4 of 3 noise levels"),
    ("steps", "actor.steps_per_forward=9", "more_steps_than_trained", "=9 of 3 SDE steps"),
    ("steps", "actor.ema.update_interval=9999", "averages_after_the_end", "=9999 of 760 updates"),
    ("text", "rollout.pipeline.height=64", "rollout.pipeline", "set, and has no effect with model"),
    ("text", "rollout.algo.noise_level=0.5", "rollout.algo", "belongs to images"),
    ("text", f"{LOSS}.clip_ratio=1.0e-3", LOSS, "belongs to images"),
    ("text", "actor.steps_per_forward=2", "actor.steps_per_forward", "actor.steps_per_forward=1"),
    ("text", "rollout.val_kwargs.height=64", "rollout.val_kwargs.height", "height=null"),
    ("text", "rollout.val_kwargs.width=64", "rollout.val_kwargs.width", "width=null"),
    ("text", "rollout.val_kwargs.num_frames=5", "rollout.val_kwargs.num_frames", "=null"),
    (
        "text",
        "rollout.val_kwargs.num_inference_steps=9",
        "rollout.val_kwargs.num_inference_steps",
        "num_inference_steps=40",
    ),
    ("text", "rollout.val_kwargs.guidance_scale=2", "rollout.val_kwargs.guidance_scale", "=4.5"),
    ("text", "rollout.val_kwargs.true_cfg_scale=2", "rollout.val_kwargs.true_cfg_scale", "=null"),
    (
        "text",
        "rollout.val_kwargs.guidance_scale_2=2",
        "rollout.val_kwargs.guidance_scale_2",
        "guidance_scale_2=null",
    ),
    ("text", "data.negative_prompt=dark", "data.negative_prompt", "negative_prompt=dark has no"),
    ("steps", "model.chat_template_kwargs={a: 1}", "model.chat_template_kwargs", "belongs to text"),
    ("steps", "rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.temperature", "=0.0"),
    ("steps", "actor.token_loss.clip_ratio_low=0.1", "actor.token_loss", "actor.token_loss is set"),
    ("steps", "rollout.temperature=0.5", "rollout.temperature", "temperature=1.0"),
    ("steps", "rollout.prompt_length=5", "rollout.prompt_length", "prompt_length=512"),
    ("steps", "rollout.response_length=5", "rollout.response_length", "response_length=512"),
    ("steps", "model.dtype=fp64 trainer.device=auto", "trainer.device=cpu", "model.dtype=fp64 ne"),
    ("steps", "rollout.dtype=fp64 trainer.device=auto", "trainer.device=cpu", "rollout.dtype=fp64"),
    (
        "steps",
        "model.dtype=fp64 trainer.mixed_precision=bf16",
        "trainer.mixed_precision=no",
        "it is bf16",
    ),
    (
        "steps",
        "rollout.dtype=fp64 trainer.mixed_precision=bf16",
        "trainer.mixed_precision=no",
        "exact comparisons",
    ),
    (
        "text",
        f"{RC}.loss_type=ppo_clip {RC}.bypass_mode=true {RC}.bypass_level=window",
        f"{RC}.bypass_level",
        "whole responses are corrected",
    ),
    ("text", f"{RC}.log_prob_scale=sum", f"{RC}.log_prob_scale", "is no mean"),
    ("text", f"{RC}.centered=true", f"{RC}.centered", "means of Gaussian steps"),
    (
        "text",
        f"{RC}.rollout_rs=step_kl {RC}.rollout_rs_threshold=1",
        "rejects_by_step_kl",
        "token_k3 estimates the same",
    ),
    (
        "text",
        f"{RC}.rollout_rs=token_k1 {RC}.rollout_rs_threshold=auto:4",
        "band_that_follows",
        "give a number",
    ),
    (
        "text",
        f"{RC}.bypass_mode=true {RC}.loss_type=reinforce actor.token_loss.loss_mode=gspo",
        "actor.token_loss.loss_mode",
        "loss_mode=gspo has no effect",
    ),
    (
        "steps",
        f"{RC}.loss_type=reinforce {LOSS}.loss_mode=flow_dppo {LOSS}.clip_ratio=1.0e-4",
        f"{LOSS}.loss_mode",
        "has no clip",
    ),
    (
        "steps",
        f"{RC}.bypass_mode=false {LOSS}.loss_mode=grpo_guard",
        f"{RC}.bypass_mode=true",
        f"{LOSS}.clip_ratio=auto:16 needs",
    ),
    ("steps", f"{REPLAY} {LOSS}.loss_mode=grpo_guard", "data.replay_dir", "with every update"),
    (
        "steps",
        f"{LOSS}.loss_mode={__name__}.Both {LOSS}.clip_ratio=1.0e-3 {LOSS}.kl_threshold=auto:4",
        "bound_without_a_name",
        "does not say what kl_threshold bounds",
    ),
    (
        "steps",
        f"{LOSS}.loss_mode={__name__}.Both {LOSS}.kl_threshold=auto:4",
        "two_bounds_that_follow",
        "only one option can follow",
    ),
    (
        "peers",
        f"{LOSS}.loss_mode=grpo_guard {LOSS}.clip_ratio=1.0e-4",
        "adds_a_kl",
        "which adds a KL",
    ),
    (
        "peers",
        f"{RC}.rollout_is=token {RC}.log_prob_scale=sum",
        f"{RC}.log_prob_scale=sum",
        "it is no density",
    ),
    ("steps", "actor.kl_reference=start", "actor.use_kl_loss=true", "actor.use_kl_loss=true"),
    (
        "steps",
        "actor.kl_reference=start actor.use_kl_loss=true",
        "model.lora_path",
        "needs model.lora_path",
    ),
    (
        "steps",
        f"actor.use_kl_loss=true {RC}.loss_type=reinforce {BATCH}",
        f"{RC}.rollout_is_batch_normalize",
        "would scale the KL",
    ),
    *(
        ("steps", f"{REPLAY} rollout.{key}={value}", f"rollout.{key}", f"rollout.{key}={value}")
        for key, value in (
            ("staleness", 1),
            ("workers", 1),
            ("quantization", "int8"),
            ("compile", "true"),
            ("algo.sde_window_interval", 1),
        )
    ),
    ("steps", f"{FILTER} {REPLAY}", "data.replay_dir", "filter_groups.enable=true does not go"),
    ("steps", f"{FILTER} rollout.staleness=1", "rollout.staleness", "not known ahead"),
    ("steps", f"{FILTER} model.prompt_cache=memory", "model.prompt_cache", "not known ahead"),
    ("text", "rollout.redraw=true", "rollout.redraw", "rollout.redraw=true has no effect"),
    ("steps", "actor.train_n=null rollout.redraw=true", "trains_on_all", "below rollout.n"),
    ("steps", "rollout.redraw=true", "is_exact", "the rollout is exact"),
]


@dataclass(frozen=True, kw_only=True)
class Both(FlowGRPO):
    """Reads both bounds, and says what one of them is about."""

    kl_threshold: float | Tensor


@pytest.fixture(scope="module")
def jobs() -> dict[str, Config]:
    """The jobs of the examples; not to be changed."""
    exact = ("rollout.dtype=fp32", "rollout.merge_lora=false", "trainer.num_processes=1")
    peers = ("rollout.algo.sde_type=cps", "rollout.algo.log_prob_convention=peers")
    return {
        "steps": config_of(*exact),
        "peers": config_of(*exact, *peers),
        "nft": checked_config(compose_config(exact, config_name="tiny_ocr_nft")),
        "text": checked_config(compose_config([], config_name="token_grpo")),
    }


def spec_with(config: Config, settings: str) -> RunSpec:
    """Resolves a copy of a configuration with other settings, written as on a command line."""
    return resolved(job(*re.findall(r"\S+?=(?:{.*?}+|\S*)", settings), of=config))


@pytest.mark.parametrize(("kind", "settings", "condition", "words"), EXAMPLES)
def test_a_row_refuses_what_it_names(
    jobs: dict[str, Config], kind: str, settings: str, condition: str, words: str
) -> None:
    spec = spec_with(jobs[kind], settings)
    messages = {broken: message for _, broken, message in refusals(spec)}
    assert words in messages[condition]
    assert condition.partition("=")[0] in messages[condition] or "." not in condition
    with pytest.raises(ValueError, match=re.escape(next(iter(messages.values())))):
        check_rules(spec)


def test_every_row_has_an_example(jobs: dict[str, Config]) -> None:
    shown = {
        (rule.why, broken)
        for kind, settings, _, _ in EXAMPLES
        for rule, broken, _ in refusals(spec_with(jobs[kind], settings))
    }
    rows = {
        (rule.why, condition)
        for rule in rules()
        for condition in (*rule.needs, *rule.excludes, *rule.unread)
    }
    assert rows - shown == set()


def test_what_is_just_possible_is_not_refused(jobs: dict[str, Config]) -> None:
    trained = resolved(jobs["steps"]).trained_steps
    updates = resolved(jobs["steps"]).total_updates
    limits = f"actor.steps_per_forward={trained} actor.ema.update_interval={updates}"
    assert not list(refusals(spec_with(jobs["steps"], limits)))
    # A row with two conditions needs both of them.
    decoupled = f"actor.use_kl_loss=true {RC}.bypass_mode=false {BATCH}"
    assert not list(refusals(spec_with(jobs["steps"], decoupled)))


def test_what_the_table_names_exists(jobs: dict[str, Config]) -> None:
    assert all(not list(refusals(resolved(config))) for config in jobs.values())
    named = [name for rule in rules() for name in (*rule.needs, *rule.excludes, *rule.unread)]
    keys = {name.partition("=")[0] for name in named if "." in name}
    assert keys <= known_keys()


def test_a_loss_without_log_probs_reads_no_key_of_the_correction() -> None:
    (rule,) = (rule for rule in rules() if f"{RC}.loss_type" in rule.unread)
    keys = {f"{RC}.{field.name}" for field in fields(RolloutCorrectionConfig)}
    assert {*rule.unread, *rule.excludes} == keys

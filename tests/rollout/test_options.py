"""Each option of the rollout says what it needs; what rules that out is refused by name."""

from __future__ import annotations

import re

import pytest
from support.compositions import spec_of

from flowgrpo_rc.rollout.config import CacheConfig, RolloutConfig
from flowgrpo_rc.rollout.options.cached_blocks import CachedBlocks
from flowgrpo_rc.rollout.options.compiled import Compiled
from flowgrpo_rc.rollout.options.drawing import Redraw, SharedPrefix
from flowgrpo_rc.rollout.options.merged_lora import MergedLora
from flowgrpo_rc.rollout.options.option import Need
from flowgrpo_rc.rollout.options.quantized import Quantized
from flowgrpo_rc.spec.check_engine import check_engine, shares_weights

CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
SMALL = ("rollout.n=4", "actor.train_n=2", "actor.ppo_micro_batch_size_per_gpu=2", BYPASS)
REDRAW = ("rollout.redraw=true", "rollout.dtype=bf16", *SMALL)
MERGED = ("rollout.merge_lora=true",)
# For each need: settings with an option that has it, and what rules it out.
RULED_OUT = {
    Need.NETWORK: (REDRAW, "rollout.name=vllm_omni"),
    Need.WHOLE_WEIGHTS: (MERGED, "trainer.strategy=fsdp2"),
    Need.PLAIN_WEIGHTS: (MERGED, "model.quantization=int8"),
    Need.SHARED_WINDOW: (
        ("rollout.algo.shared_prefix=true",),
        "rollout.algo.window_sharing=sample",
    ),
    Need.TRAINER_PROCESS: (REDRAW, "rollout.workers=1"),
    Need.FRESH_WEIGHTS: (REDRAW, "rollout.staleness=1"),
    Need.NEW_SAMPLES: (REDRAW, "data.replay_dir=somewhere"),
    Need.UNSAVED_SAMPLES: (REDRAW, "trainer.save_rollouts=true"),
    Need.ONE_POOL: (REDRAW, "algorithm.filter_groups.enable=true"),
    Need.WHOLE_GROUPS: (
        REDRAW,
        f"{CORRECTION}.bypass_mode=false {CORRECTION}.exclude_rejected=true",
    ),
    Need.SINGLE_SCORES: (REDRAW, "+reward.terms.vlm_preference.path=a/b"),
}


@pytest.mark.parametrize("need", RULED_OUT, ids=lambda need: need.name)
def test_what_rules_a_need_out_is_named(need: Need) -> None:
    settings, ruling_out = RULED_OUT[need]
    check_engine(spec_of(*settings))
    sentence = re.escape(f"{settings[0]} needs {need.value}, which ")
    with pytest.raises(ValueError, match=sentence) as refused:
        check_engine(spec_of(*settings, *ruling_out.split()))
    message = str(refused.value)
    assert ruling_out.split()[-1].split(".path")[0].lstrip("+") in message


def test_each_need_is_tried() -> None:
    assert RULED_OUT.keys() == {*Need}


def test_options_exclude_one_another_by_what_they_take_away() -> None:
    message = r"merge_lora=true needs frozen .* which rollout.quantization=int8 rules out"
    with pytest.raises(ValueError, match=message):
        check_engine(spec_of("rollout.merge_lora=true", "rollout.quantization=int8"))
    check_engine(spec_of("rollout.merge_lora=rounded", "rollout.quantization=int8"))


def test_an_engine_is_asked_for_what_it_applies_alone() -> None:
    with pytest.raises(ValueError, match=r"quantization=int8 has no effect with rollout.name=vllm"):
        check_engine(spec_of("rollout.name=vllm_omni", "rollout.quantization=int8"))
    check_engine(spec_of("rollout.name=vllm_omni", "rollout.algo.shared_prefix=true"))


def test_the_settings_choose_options_in_the_order_of_application() -> None:
    rollout = RolloutConfig(
        dtype="fp32",
        quantization="int8",
        compile=True,
        merge_lora=True,
        redraw=True,
        cache=CacheConfig(every=2, window=True),
    )
    rollout.algo.shared_prefix = True
    steps = tuple(range(1, 10, 2))
    assert rollout.options() == (
        MergedLora(),
        Quantized("int8", "fp32"),
        Compiled(),
        CachedBlocks(2, steps, recorded=True),
        SharedPrefix(),
        Redraw(),
    )
    spec = rollout.spec()
    assert (spec.cached_steps, spec.shared_prefix, spec.dtype) == (steps, True, "fp32+int8")
    assert RolloutConfig().options() == ()


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ((), True),
        (("rollout.algo.shared_prefix=true",), True),
        (("rollout.merge_lora=rounded",), False),
        (("rollout.quantization=int8",), False),
        (("rollout.dtype=bf16",), False),
        (("trainer.strategy=fsdp2",), False),
    ],
)
def test_weights_are_shared_where_nothing_changes_them(settings, shares):
    same = ("rollout.dtype=fp32", "model.dtype=fp32", "rollout.merge_lora=false")
    assert shares_weights(spec_of(*same, *settings)) == shares

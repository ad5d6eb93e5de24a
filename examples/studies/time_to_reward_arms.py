"""The arms of the time to reward, examples/benchmarks/time_to_reward.py: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cells import EVERY_SAMPLE, OWN_NOISE, PLAIN_JOB, SEPARATE_LORA

STUDY = "time_to_reward"
REFERENCE = "peer_flow_grpo_fast"  # what all seconds are divided by
TARGETS = ("0.60", "0.65")  # held-out rewards

RC = "algorithm.rollout_correction"
# As in the scripts of flow_grpo. The learning rate of the bundled job falls to the end of a run.
CONSTANT = ("actor.optim.lr_scheduler=constant",)
# The bundled job as it was when its arms ran: it did not merge the LoRA.
SHIPPED = (*CONSTANT, *SEPARATE_LORA)
# The base of most other arms, in which groups are as in flow_grpo.
BASE = (*CONSTANT, *PLAIN_JOB)
WHOLE_SCHEDULE = ("rollout.algo.tail_steps=null",)
SINGLE_STEPS = ("actor.steps_per_forward=1", "actor.ppo_micro_batch_size_per_gpu=24")
# The fast script of flow_grpo: its sampling batch is its training batch, everything is fp32, and
# nothing is rejected.
FAST = (
    *BASE,
    *WHOLE_SCHEDULE,
    *SINGLE_STEPS,
    "rollout.dtype=fp32",
    "rollout.micro_batch_size_per_gpu=24",
    f"{RC}=bypass_ppo_clip",
)

# Overrides of the bundled job, configs/tiny_ocr.yaml.
ARMS: Mapping[str, Sequence[str]] = {
    "shipped": SHIPPED,
    "shipped_2_processes": (*SHIPPED, "trainer.num_processes=2"),
    "first_window": (*SHIPPED, "rollout.algo.sde_window_interval=50"),
    "own_noise": (*SHIPPED, *OWN_NOISE),
    "every_sample": (*SHIPPED, *EVERY_SAMPLE),
    "base": BASE,
    "fp32": (*BASE, "rollout.dtype=fp32"),
    "whole_schedule": (*BASE, *WHOLE_SCHEDULE),
    "merged_lora": (*CONSTANT, *EVERY_SAMPLE, *OWN_NOISE, "rollout.merge_lora=true"),
    "single_steps": (*BASE, *SINGLE_STEPS),
    "reuse": (*BASE, "rollout.reuse=1"),  # a key that is gone; see RETIRED
    "ahead_1": (*BASE, "rollout.workers=1", "rollout.staleness=1"),
    "ahead_4": (*BASE, "rollout.workers=1", "rollout.staleness=4"),
    "window_2": (*BASE, "rollout.algo.sde_window_size=2"),
    "flow_grpo_fast": FAST,
}

# Arms whose results stay and whose settings are gone: `rollout.reuse=k` trained on the samples of
# k earlier steps again, and brought nothing.
RETIRED = ("reuse",)


class PeerArm(NamedTuple):
    """A training script of another project, with the settings of the bundled job.

    Attributes:
      project: its name in --peer.
      script: the script, in the project's checkout.
      settings: further changes of its configuration, `key=value`.
      processes: how many torchrun starts.
    """

    project: str
    script: str
    settings: Sequence[str] = ()
    processes: int = 1


PEER_ARMS: Mapping[str, PeerArm] = {
    "peer_flow_grpo_fast": PeerArm("flow_grpo", "scripts/train_sd3_fast.py"),
    "peer_flow_grpo_fast_2_processes": PeerArm(
        "flow_grpo", "scripts/train_sd3_fast.py", processes=2
    ),
    "peer_flow_grpo_fast_tight": PeerArm(
        "flow_grpo", "scripts/train_sd3_fast.py", ("train.clip_range=1e-5",)
    ),
    "peer_flow_grpo_default": PeerArm("flow_grpo", "scripts/train_sd3.py", ("train.beta=0.04",)),
}

# Arms that only the clock measures -> the arm that learns the same in as many iterations.
REPEATS: Mapping[str, str] = {
    "shipped_2_processes": "shipped",
    "peer_flow_grpo_fast_2_processes": "peer_flow_grpo_fast",
}


def clock_name(arm: str) -> str:
    """Returns the name of the cell with the seconds of an arm's iteration."""
    return f"clock_{arm}"


def settings(arm: str) -> list[str]:
    """Lists what sets an arm apart, for a reader."""
    if arm in ARMS:
        return list(ARMS[arm])
    peer = PEER_ARMS[arm]
    started = [f"torchrun --nproc-per-node={peer.processes}"] if peer.processes > 1 else []
    return [*started, peer.script, *peer.settings]

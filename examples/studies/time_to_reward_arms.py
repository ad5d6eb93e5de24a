"""The arms of the time to reward, examples/benchmarks/time_to_reward.py: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cells import EVERY_SAMPLE, OWN_NOISE, SEPARATE_LORA

STUDY = "time_to_reward"
REFERENCE = "flow_grpo_fast"  # what all seconds are divided by
TARGET = 0.60  # held-out reward

# As in the scripts of flow_grpo. The learning rate of the bundled job falls to the end of a run.
CONSTANT = ("actor.optim.lr_scheduler=constant",)

# Overrides of the bundled job, configs/tiny_ocr.yaml.
OURS: Mapping[str, Sequence[str]] = {
    "bundled": CONSTANT,
    "bundled_2_processes": (*CONSTANT, "trainer.num_processes=2"),
}
# The bundled job without one of its settings each. Only the clock measures these.
WITHOUT: Mapping[str, Sequence[str]] = {
    "rollout.algo.shared_prefix": OWN_NOISE,
    "rollout.algo.tail_steps": ("rollout.algo.tail_steps=null",),
    "actor.train_n": EVERY_SAMPLE,
    "rollout.merge_lora": SEPARATE_LORA,
    "rollout.dtype": ("rollout.dtype=fp32",),
    "actor.steps_per_forward": ("actor.steps_per_forward=1",),
    "reward.terms.ocr.batch_size": ("reward.terms.ocr.batch_size=1",),
}
ARMS = OURS | {key: (*CONSTANT, *overrides) for key, overrides in WITHOUT.items()}


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


FAST = "scripts/train_sd3_fast.py"
PEER_ARMS: Mapping[str, PeerArm] = {
    REFERENCE: PeerArm("flow_grpo", FAST),
    "flow_grpo_fast_2_processes": PeerArm("flow_grpo", FAST, processes=2),
    "flow_grpo_default": PeerArm("flow_grpo", "scripts/train_sd3.py", ("train.beta=0.04",)),
}

# Arms that only the clock measures -> the arm that learns the same in as many iterations.
REPEATS: Mapping[str, str] = {
    "bundled_2_processes": "bundled",
    "flow_grpo_fast_2_processes": REFERENCE,
}
# What is measured side by side in one go; its cell has the name of the go.
GOES: Mapping[str, Sequence[str]] = {
    "jobs": (*OURS, *PEER_ARMS),
    "settings": ("bundled", *WITHOUT),
}


def settings(arm: str) -> list[str]:
    """Lists what sets an arm apart, for a reader."""
    if arm in ARMS:
        return list(ARMS[arm])
    peer = PEER_ARMS[arm]
    started = [f"torchrun --nproc-per-node={peer.processes}"] if peer.processes > 1 else []
    return [*started, peer.script, *peer.settings]

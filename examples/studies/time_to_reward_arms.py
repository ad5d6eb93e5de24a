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


class Lever(NamedTuple):
    """A setting of the bundled job that makes an iteration cheaper.

    Attributes:
      without: overrides of the bundled job that take it away.
      leaves_away: what is not done.
      changes: what becomes different by that.
    """

    without: Sequence[str]
    leaves_away: str
    changes: str


# Only the clock measures the bundled job without these.
LEVERS: Mapping[str, Lever] = {
    "rollout.algo.shared_prefix=true": Lever(
        OWN_NOISE,
        "what samples of a prompt share up to their window, in rollout and update",
        "samples of a prompt start from the same noise",
    ),
    "rollout.algo.tail_steps=2": Lever(
        ("rollout.algo.tail_steps=null",),
        "evaluations behind `sde_window_range`, the last ones first",
        "the final image",
    ),
    "actor.train_n=6": Lever(
        EVERY_SAMPLE,
        "the update on samples whose reward is near the mean of their group",
        "the gradient, a little ([PODS](https://arxiv.org/abs/2504.13818))",
    ),
    "rollout.merge_lora=null": Lever(
        SEPARATE_LORA,
        "the LoRA's own layers in the rollout",
        "the mismatch: sampling weights are rounded once more",
    ),
    "rollout.dtype=auto": Lever(
        ("rollout.dtype=fp32",),
        "products in fp32, where the CPU has units for bf16",
        "the mismatch, which the correction is there for",
    ),
    "actor.steps_per_forward=null": Lever(
        ("actor.steps_per_forward=1",),
        "forwards of the update: all steps of a window in one",
        "memory",
    ),
    "reward.terms.ocr.batch_size=2": Lever(
        ("reward.terms.ocr.batch_size=1",),
        "half of the reader's calls",
        "nothing",
    ),
    "reward.terms.ocr.engine=auto": Lever(
        ("reward.terms.ocr.engine=onnxruntime",),
        "a third of reading, where the extra `openvino` is installed",
        "nothing: the same texts",
    ),
}
ARMS: Mapping[str, Sequence[str]] = {
    **OURS,
    **{key: (*CONSTANT, *lever.without) for key, lever in LEVERS.items()},
}


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
    "levers": ("bundled", *LEVERS),
    "without_bf16": ("bundled", REFERENCE),
}
# Environment variables of a go: without the bf16 units of this CPU oneDNN takes plain AVX-512.
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "without_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
# What `auto` would decide there for the bundled job, but for the flags of this CPU.
DECIDED: Mapping[str, Sequence[str]] = {"without_bf16": ("rollout.dtype=fp32",)}


def settings(arm: str) -> list[str]:
    """Lists what sets an arm apart, for a reader."""
    if arm in ARMS:
        return list(ARMS[arm])
    peer = PEER_ARMS[arm]
    started = [f"torchrun --nproc-per-node={peer.processes}"] if peer.processes > 1 else []
    return [*started, peer.script, *peer.settings]

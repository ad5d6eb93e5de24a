"""Small runs on the tagged device, and what must hold of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from support.tagged_device import TO_DEVICE, TO_HOST, WAIT, Record, Tagged, tagged_device
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.algorithm import PolicyGradient
from flowgrpo_rc.cli import main
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.policies import flow
from flowgrpo_rc.training.update import PolicyUpdate

MICRO_BATCH = "micro-batch"
OPTIMIZER_STEP = "optimizer step"  # without its micro-batches
ROLLOUT = "rollout"
STOCHASTIC_STEP = "stochastic step"
PHASES = {
    MICRO_BATCH: (PolicyGradient, "_piece"),
    OPTIMIZER_STEP: (PolicyUpdate, "_mini_batch"),
    ROLLOUT: (flow, "sample_trajectory"),
    STOCHASTIC_STEP: (flow, "sample"),
}

IMAGES = (
    "data.train_batch_size=4",
    "rollout.n=2",
    "rollout.dtype=bf16",
    "rollout.micro_batch_size_per_gpu=4",
    "rollout.pipeline.num_inference_steps=4",
    "rollout.algo.sde_window_size=2",
    "rollout.algo.sde_window_range=[0,3]",
    "rollout.algo.shared_prefix=false",  # which waits once in a forward
    "rollout.algo.tail_steps=null",
    "rollout.val_kwargs.num_inference_steps=2",
    "rollout.val_kwargs.n=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.steps_per_forward=1",
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1.0",
    "trainer.total_training_steps=2",
)
ONE_STEP = (*IMAGES, "trainer.total_training_steps=1", "trainer.val_before_train=false")
TEXT = (
    "--config-name=token_grpo",
    "data.train_batch_size=4",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=8",
    "rollout.val_kwargs.n=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.total_training_steps=2",
)


def train(folder: Path, settings: tuple[str, ...], *, code: int = 0) -> Record:
    """Runs the training command on the tagged device, and returns what happened there."""
    with tagged_device(PHASES) as record:
        assert main(["train", *settings, f"trainer.output_dir={folder}"]) == code
    return record


def wrong(record: Record, *, waits_of_network: int = 0) -> list[str]:
    """Returns what would fail or be slow on a GPU.

    That is what the device refused; a wait in a micro-batch, more than 2 of an optimizer step, and
    more than 1 of a stochastic step of a rollout, which has 1 besides; and anything that the host
    sends in a micro-batch or an optimizer step.
    """
    allowed = {
        MICRO_BATCH: waits_of_network * record.entered[MICRO_BATCH],
        OPTIMIZER_STEP: 2 * record.entered[OPTIMIZER_STEP],
        ROLLOUT: record.entered[ROLLOUT] + record.entered[STOCHASTIC_STEP],
        STOCHASTIC_STEP: 0,
    }
    found = list(record.refused)
    for phase, most in allowed.items():
        waits = record.found(phase, WAIT, TO_HOST)
        if sum(waits.values()) > most:
            found += [f"{number} > {most}: {event}" for event, number in waits.items()]
    sent = record.found(MICRO_BATCH, TO_DEVICE) | record.found(OPTIMIZER_STEP, TO_DEVICE)
    return found + [f"{number} > 0: {event}" for event, number in sent.items()]


def waits(record: Record) -> set[str]:
    """Returns the functions that wait in a micro-batch, or send."""
    assert record.refused == []
    return {event.source for event in record.found(MICRO_BATCH, WAIT, TO_HOST, TO_DEVICE)}


@contextmanager
def two_ranks() -> Iterator[None]:
    """Lets accelerate see two processes whose collectives are NCCL's, which take no CPU tensors.

    The other process adds zeros to a sum, and has the same rows.
    """

    def reduce(self: Accelerator, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return _on_device(tensor).clone()

    def gather(self: Accelerator, tensor: Tensor) -> Tensor:
        return torch.cat([_on_device(tensor)] * 2)

    def pad(self: Accelerator, tensor: Tensor, pad_index: float = 0) -> Tensor:
        return _on_device(tensor)

    with (
        mock.patch.multiple(torch.distributed, get_backend=lambda: "gloo", all_reduce=_on_device),
        mock.patch.object(Processes, "meet"),
        mock.patch.multiple(
            Accelerator,
            num_processes=2,
            reduce=reduce,
            gather=gather,
            pad_across_processes=pad,
            wait_for_everyone=lambda self: None,
        ),
    ):
        yield


def _on_device(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tagged):
        raise RuntimeError("No backend type associated with device type cpu")
    return tensor

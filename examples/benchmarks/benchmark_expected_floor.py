"""How well the expectation of a training graph in bf16 fits rollouts in bf16 without a fault, on
the bundled model.

48 samples of 3 steps are evaluated by the training graph and by copies of it in other batch shapes
and with other
kernels, without training. Reported for guidance 1 and 4.5: the range of `mismatch_over_expected`
over batches of 8, with an expectation of the first 16. It takes a minute on a CPU core.
"""

from __future__ import annotations

import json
from functools import partial

import torch
from accelerate import Accelerator

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.build import make_source, make_task
from flowgrpo_rc.calibration.measure import Copy
from flowgrpo_rc.config.check_inputs import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.monitoring.expected_mismatch import LEAST, ExpectedMismatch, by_cell
from flowgrpo_rc.monitoring.mismatch import over
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.training.tasks.image import ImageTask

SETTINGS = [
    *(
        "model.dtype=bf16",
        "rollout.dtype=fp32",
        "data.train_batch_size=12",
        "rollout.n=4",
        "trainer.device=cpu",
    ),
    *(
        "actor.ppo_mini_batch_size=12",
        "actor.ppo_micro_batch_size_per_gpu=12",
        "rollout.micro_batch_size_per_gpu=12",
    ),
    *("reward.terms.ocr=null", "reward.terms.jpeg.weight=1"),
]


def configure(guidance: float) -> Config:
    return to_config(compose_config([*SETTINGS, f"rollout.pipeline.guidance_scale={guidance}"]))


def ratios(
    policy: FlowPolicy,
    other: FlowPolicy,
    rows: int,
    batch: DiffusionBatch,
    expected: ExpectedMismatch,
) -> list[float]:
    """Returns `mismatch_over_expected` of every 8 samples."""
    difference = policy.log_probs(batch, 12).double() - other.log_probs(batch, rows)
    found = []
    for start in range(0, len(batch), 8):
        part = batch.rows(start, start + 8)
        sums = by_cell(
            difference[start : start + 8],
            part.step_mask,
            policy.cells(part),
            len(policy.cell_names(part)),
        )
        total, count = over(sums, expected.values(sums))
        found.append((total / count).item())
    return found


def main() -> None:
    processes = Processes(Accelerator(cpu=True))
    model = make_task(configure(1.0), processes).model
    source = torch.Generator().manual_seed(0)
    for name, parameter in lora_parameters(model.network).items():
        if "lora_B" in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=source))
    assert isinstance(model, FlowModel)
    policy = FlowPolicy(model, model.network)
    copies = {f"{rows} at once": (Copy(model, "bf16", None, rows).policy, rows) for rows in (12, 1)}
    exact = Copy(model, "fp32", None, 12).policy
    copies["other kernels"] = (
        exact.rounded_otherwise(partial(torch.autocast, "cpu", torch.bfloat16)),
        12,
    )
    for guidance in (1.0, 4.5):
        config = configure(guidance)
        task = ImageTask(model, policy, config.rollout, seed=0)
        rewards = RewardManager(config.reward)
        engine = make_source(config, task, prompts_of(config)[0], rewards, processes, first_step=0)
        engine.sync_weights(
            {name: p.detach().clone() for name, p in lora_parameters(model.network).items()}, 0
        )
        batch = engine.collect(1).batch
        assert isinstance(batch, DiffusionBatch)
        least = LEAST["diffusion"]
        expected = ExpectedMismatch(
            policy,
            policy.rounded_otherwise(),
            processes,
            size=1.0,
            least=least,
            micro_batch_size=12,
        )
        expected.measure(batch.rows(0, 16), len(policy.cell_names(batch)))
        for name, (copy, rows) in copies.items():
            found = ratios(policy, copy, rows, batch, expected)
            print(
                json.dumps({f"{name}, guidance {guidance}": [min(found), max(found)]}), flush=True
            )
        rewards.close()
        engine.close()


if __name__ == "__main__":
    main()

"""What `auto:4` rejects on the bundled model, whose rollout is bf16 and whose training graph is
fp32.

Iterations of 128 samples, all trained steps: the bands follow each iteration after they judged it.
From the ninth on, the share of held-out steps that each criterion rejects is reported, and the same
with an error planted on every sample: ten robust standard deviations of the step's own mismatch, up
or down for the whole sample. The KL's root is moved by ten of its own. It takes some minutes on two
CPU cores; no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch, PromptBatch
from flowgrpo_rc.config.check_inputs import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.history import MEMORY
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.models.base import load_model
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest

CRITERIA = "token_k1,token_k2,token_k3,seq_mean_k1,seq_sum_k2,seq_max_k3,step_kl"
PROMPTS = 8
SAMPLES = 16
PLANTED = 10.0
CPU = torch.device("cpu")

Iteration = tuple[DiffusionBatch, Tensor, Tensor]


def iterations(count: int) -> Iterator[Iteration]:
    """Yields each iteration's batch, log-probs of the training graph and KL; the LoRA is random."""
    config = to_config(compose_config([]))
    model = load_model(config.model, CPU)
    network = add_lora(model, config.model, config.trainer.seed)
    lora = lora_parameters(network)
    source = torch.Generator().manual_seed(1)
    for name, parameter in lora.items():
        if "lora_B" in name:
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=source))
    engine = DiffusersEngine(model, network, dtype="bf16", chunk_size=32)
    engine.sync_weights({name: parameter.detach() for name, parameter in lora.items()}, 0)
    policy = FlowPolicy(model, network)
    sampler = prompts_of(config)[0]
    steps = config.rollout.pipeline.num_inference_steps - 1
    for index in range(count):
        request = ImageRequest(
            prompts=PromptBatch(
                step=index, prompts=sampler.step(index)[:PROMPTS], slots=range(PROMPTS)
            ),
            samples_per_prompt=SAMPLES,
            spec=replace(config.rollout.spec(), dtype="bf16"),
            window=torch.arange(steps).expand(PROMPTS * SAMPLES, -1),
            seeds=[10**6 * index + row for row in range(PROMPTS * SAMPLES)],
            keep_means=True,
        )
        batch = concat([chunk.batch for chunk in engine.generate(request)])
        assert isinstance(batch, DiffusionBatch)
        found = policy.measure(batch, 32)
        assert found.step_kl is not None
        yield batch, found.log_probs, found.step_kl


def planted(given: Iteration, bands: AutoBands, seed: int) -> Iteration:
    batch, training, kl = given
    log_ratio, root = (
        bands.scale(name).spread[batch.step_indices] for name in ("token_k1", "step_kl")
    )
    sign = torch.randint(2, (len(batch), 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return batch, training + PLANTED * sign * log_ratio, ((2 * kl).sqrt() + PLANTED * root) ** 2 / 2


def rejected(bands: AutoBands, given: Iteration) -> dict[str, float]:
    metrics = bands.judge(*given)[1].compute()
    return {
        band.name: metrics[f"rollout_rs_{band.name}_masked_fraction"]
        for band in parse_bands(CRITERIA, "auto:4")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=24)
    count = parser.parse_args().iterations
    if count <= MEMORY[0]:
        raise SystemExit(f"--iterations={count}: the first {MEMORY[0]} are not reported; give more")
    bands = AutoBands(parse_bands(CRITERIA, "auto:4"), 10, CPU)
    rows = []
    for index, given in enumerate(iterations(count)):
        if index >= MEMORY[0]:
            apart = AutoBands(parse_bands(CRITERIA, "auto:4"), 10, CPU)
            apart.load(bands.tensors())
            rows.append(
                {
                    "clean": rejected(apart, given),
                    "planted": rejected(apart, planted(given, apart, index)),
                }
            )
        bands.judge(*given)
        bands.finish(identity)
    result = {
        kind: {name: sum(row[kind][name] for row in rows) / len(rows) for name in rows[0][kind]}
        for kind in ("clean", "planted")
    }
    print(json.dumps({"samples": len(rows) * PROMPTS * SAMPLES, "rejected": result}, indent=1))


if __name__ == "__main__":
    main()

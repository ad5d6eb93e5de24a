"""What the engine recorded against what the trainer makes of it, with the same weights and before
any update.

Legend: B samples, T steps of the range that windows are drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec, concat
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.random import derive_seed, generator
from flowgrpo_rc.correction.auto_bands import ROBUST
from flowgrpo_rc.losses.config import DiffusionLossConfig
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.rollout.replica import Replica

MOVEMENT = 0.02  # size of a planted movement, relative to the weights that it is added to
FEW = (2, 4)  # prompts and samples of each that are replayed again and again


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRollout:
    """What the engine was asked for, and what it recorded."""

    request: ImageRequest
    batch: DiffusionBatch

    @property
    def recorded(self) -> Tensor:
        """Log-probs [B, T]."""
        assert self.batch.rollout_log_probs is not None
        return self.batch.rollout_log_probs

    @property
    def timesteps(self) -> list[int]:
        """[T]."""
        return [round(1000 * sigma) for sigma in self.batch.sigmas[self.request.window[0]].tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Log-probs of the trainer minus those of a sampler, [B, T] float64, at a guidance and in a
    precision.

    engine: the sampler is the engine; otherwise a copy of the trainer's own network, on the same
        recorded steps.
    """

    guidance: float
    precision: str
    engine: bool
    timesteps: Sequence[int]
    differences: Tensor

    @property
    def name(self) -> str:
        return f"{'engine' if self.engine else 'copy'} {self.precision} cfg={self.guidance:g}"

    def by_timestep(self) -> list[float]:
        """Mean |difference| [T]."""
        return self.differences.abs().mean(0).tolist()

    def scale(self) -> float:
        """The noise floor: the robust standard deviation of the differences."""
        return robust(self.differences)

    def quantile(self, q: float) -> float:
        """Of |difference|."""
        return torch.quantile(self.differences.abs().flatten(), q).item()

    def summary(self) -> dict[str, float]:
        mean = self.differences.abs().mean().item()
        quantiles = {f"p{100 * q:g}": self.quantile(q) for q in (0.5, 0.99, 0.999)}
        return {"mean": mean, **quantiles, "max": self.quantile(1.0), "floor": self.scale()}


def robust(values: Tensor) -> float:
    """The robust standard deviation, 1.4826 times the median deviation."""
    return ROBUST * (values - values.median()).abs().median().item()


def plant_movements(network: nn.Module, seed: int) -> list[dict[str, Tensor]]:
    """Moves the LoRA of `network` twice, at random, and returns its tensors before, between and
    after.

    A fresh LoRA changes nothing, so that an engine without it, or with that of the step before,
    would go unnoticed.
    """
    states = [_copied(network)]
    for movement in range(2):
        for name, parameter in lora_parameters(network).items():
            if ".lora_B." in name:
                _move(network, name, parameter, generator(seed, "movement", movement, name))
        states.append(_copied(network))
    return states


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in lora_parameters(network).items()
    }


@torch.no_grad()
def _move(network: nn.Module, name: str, up: Tensor, source: torch.Generator) -> None:
    """Adds noise N to a LoRA's B such that scale |N A| is `MOVEMENT` |W| (Frobenius norms)."""
    path, _, adapter = name.removesuffix(".weight").partition(".lora_B.")
    layer: Any = network.get_submodule(path)
    down, weight = layer.lora_A[adapter].weight, layer.base_layer.weight
    noise = torch.randn(up.shape, generator=source).to(up)
    size = ((noise @ (down @ down.T)) * noise).sum().sqrt() * layer.scaling[adapter]
    up.add_(noise * (MOVEMENT * weight.float().norm() / size))


def other_guidance(model: FlowModel, spec: SamplerSpec) -> SamplerSpec:
    """The sampler without guidance or, where it has none, with the usual one."""
    scale = 1.0 if model.cfg_scale(spec) > 1 else PipelineConfig().guidance_scale
    return with_guidance(spec, model.cfg_key, scale)


def with_guidance(spec: SamplerSpec, key: str, scale: float) -> SamplerSpec:
    """key: guidance_scale or true_cfg_scale."""
    changed: dict[str, Any] = {key: scale}
    return replace(spec, **changed)


def ask(
    config: Config,
    prompts: Sequence[Prompt],
    samples: int,
    spec: SamplerSpec,
    *,
    keep_means: bool = False,
) -> ImageRequest:
    """`samples` of each prompt, all steps stochastic that a window could hold."""
    _, first, last = config.rollout.window()
    rows = [(prompt.index, sample) for prompt in prompts for sample in range(samples)]
    return ImageRequest(
        prompts=PromptBatch(step=0, prompts=prompts, slots=range(len(prompts))),
        samples_per_prompt=samples,
        spec=spec,
        window=torch.arange(first, last).expand(len(rows), -1),
        seeds=[derive_seed(config.trainer.seed, "calibration", *row) for row in rows],
        keep_means=keep_means,
    )


def sample(engine: RolloutEngine[ImageRequest], request: ImageRequest) -> RecordedRollout:
    """ValueError for log-probs that are no numbers, and for means that are missing."""
    batch = concat([chunk.batch for chunk in engine.generate(request)])
    assert isinstance(batch, DiffusionBatch)
    rollout = RecordedRollout(request=request, batch=batch)
    if request.keep_means and batch.prev_sample_mean is None:
        raise ValueError(
            "actor.diffusion_loss.loss_mode compares means, and the engine recorded none "
            "(prev_sample_mean): use "
            f"another rollout.name, or loss_mode={DiffusionLossConfig.loss_mode}"
        )
    require_finite(rollout, rollout.recorded, "engine", "rollout.dtype")
    return rollout


def require_finite(rollout: RecordedRollout, log_probs: Tensor, whose: str, key: str) -> None:
    """ValueError where one of the log-probs [B, T] is nan or inf."""
    broken = ~log_probs.isfinite()
    if broken.any():
        steps = sorted(set(rollout.batch.step_indices[broken].tolist()))
        raise ValueError(
            f"{int(broken.sum())} of {broken.numel()} log-probs of the {whose} are nan or inf, at "
            f"steps {steps} of the "
            f"schedule: there is nothing to calibrate before that is mended; see {key} (fp16 "
            "overflows early), the "
            "weights, and whether rollout.algo.sde_window_range holds a step without noise"
        )


def against_engine(rollout: RecordedRollout, log_probs: Tensor, guidance: float) -> Mismatch:
    """The trainer's log-probs [B, T] against those that the engine recorded."""
    return Mismatch(
        guidance=guidance,
        precision=rollout.request.spec.dtype,
        engine=True,
        timesteps=rollout.timesteps,
        differences=log_probs.double() - rollout.recorded.double(),
    )


class Copy:
    """The trainer's network in another precision, replaying what an engine recorded in the shape of
    its batches.
    """

    def __init__(self, model: FlowModel, dtype: str, quantization: str | None, rows: int) -> None:
        self.replica = Replica(model.network, dtype, quantization)
        self.policy = FlowPolicy(model, self.replica.network)
        self.model, self.precision, self.rows = model, self.replica.precision, rows

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.replica.sync(state, 0)

    def log_probs(self, batch: DiffusionBatch) -> Tensor:
        """[B, T]."""
        return self.policy.log_probs(batch, self.rows)

    def against(self, rollout: RecordedRollout, log_probs: Tensor, guidance: float) -> Mismatch:
        """The trainer's log-probs [B, T] against this copy's."""
        return Mismatch(
            guidance=guidance,
            precision=self.precision,
            engine=False,
            timesteps=rollout.timesteps,
            differences=log_probs.double() - self.log_probs(rollout.batch).double(),
        )


def finite(value: float) -> float | None:
    """As JSON has it."""
    return value if math.isfinite(value) else None

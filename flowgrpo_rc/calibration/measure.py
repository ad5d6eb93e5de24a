"""The mismatch of engine and trainer, with the same weights and before any update.

Shapes: B samples, T steps of the range that windows are drawn from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.batch import DiffusionBatch, Prompt, PromptBatch, SamplerSpec
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.random import derive_seed, generator
from flowgrpo_rc.correction.history import ROBUST
from flowgrpo_rc.losses.config import DiffusionLossConfig
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.rollout.options.option import RolloutOption
from flowgrpo_rc.rollout.options.quantized import Quantized
from flowgrpo_rc.rollout.replica import Replica, ReplicaEngine

MOVEMENT = 0.02  # size of a planted movement, relative to the weights that it is added to
PRECISIONS = ("fp32", "fp16", "bf16")  # of the copies, besides the engine's own precision
FEW = (2, 4)  # number of prompts, and samples of each, that the replays use


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRollout:
    """A request to the engine, and the samples that it recorded, all chunks together."""

    request: ImageRequest
    batch: DiffusionBatch

    @property
    def recorded(self) -> Tensor:
        """The engine's log-probs, [B, T]."""
        assert self.batch.rollout_log_probs is not None
        return self.batch.rollout_log_probs

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each sample, [B]."""
        return [self.request.prompt_of(row) for row in range(len(self.batch))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Log-probs of the trainer minus those of a sampler, on the same recorded steps."""

    guidance: float
    precision: str  # the sampler's
    engine: bool  # True for the engine, False for a copy of the trainer's network
    timesteps: Sequence[int]  # [T]
    differences: Tensor  # float64, [B, T]

    @property
    def name(self) -> str:
        """The sampler in words."""
        return f"{'engine' if self.engine else 'copy'} {self.precision} cfg={self.guidance:g}"

    def by_timestep(self) -> list[float]:
        """Returns the mean |difference| at each timestep, [T]."""
        return self.differences.abs().mean(0).tolist()

    def mean(self) -> float:
        """Returns the mean |difference|."""
        return self.differences.abs().mean().item()

    def summary(self) -> dict[str, float]:
        """Returns mean, quantiles and maximum of |difference|, and the robust noise floor."""
        sizes = self.differences.abs().flatten()
        names = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
        quantiles = {name: torch.quantile(sizes, q).item() for name, q in names.items()}
        return {"mean": self.mean(), **quantiles, "floor": robust(self.differences)}


def robust(values: Tensor) -> float:
    """Returns the robust standard deviation: 1.4826 times the median absolute deviation."""
    return ROBUST * (values - values.median()).abs().median().item()


@torch.no_grad()
def plant_movements(network: nn.Module, seed: int) -> list[dict[str, Tensor]]:
    """Moves a network's LoRA twice at random; returns it before, between and after the movements.

    A fresh LoRA changes nothing. Nobody would notice an engine that lacks it or holds the LoRA of
    the step before. A movement adds noise N to each B such that scale |N A| is `MOVEMENT` |W|
    (Frobenius norms).
    """
    parameters = lora_parameters(network)
    states = [{name: p.detach().clone() for name, p in parameters.items()}]
    for movement in range(2):
        for name, up in parameters.items():
            if ".lora_B." not in name:
                continue
            path, _, adapter = name.removesuffix(".weight").partition(".lora_B.")
            layer: Any = network.get_submodule(path)
            down = layer.lora_A[adapter].weight
            source = generator(seed, "movement", movement, name)
            noise = torch.randn(up.shape, generator=source).to(up)
            size = ((noise @ (down @ down.T)) * noise).sum().sqrt() * layer.scaling[adapter]
            up.add_(noise * (MOVEMENT * layer.base_layer.weight.float().norm() / size))
        states.append({name: p.detach().clone() for name, p in parameters.items()})
    return states


def other_guidance(model: FlowModel, spec: SamplerSpec) -> SamplerSpec:
    """Returns the sampler without guidance; with the usual guidance if it has none."""
    scale = 1.0 if model.cfg_scale(spec) > 1 else PipelineConfig().guidance_scale
    return with_guidance(spec, model.cfg_key, model.cfg_value(scale))


def with_guidance(spec: SamplerSpec, key: str, scale: float) -> SamplerSpec:
    """Returns the sampler with another guidance.

    A second scale moves with the first, and both reach 1, which is no guidance, together.
    """
    changes: dict[str, Any] = {key: scale}
    second = spec.guidance_scale_2
    first = spec.guidance_scale
    if key == "guidance_scale" and second is not None and first > 1:
        share = (scale - 1) / (first - 1)
        changes["guidance_scale_2"] = 1 + (second - 1) * share
    return replace(spec, **changes)


def ask(
    config: Config,
    prompts: Sequence[Prompt],
    samples: int,
    spec: SamplerSpec,
    *,
    keep_means: bool = False,
) -> ImageRequest:
    """Makes a request in which all steps are stochastic that a window could hold."""
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


def sample(
    engine: RolloutEngine[ImageRequest], request: ImageRequest, *, needs_means: bool = False
) -> RecordedRollout:
    """Samples with the engine. Log-probs must be finite, and means there if they are needed."""
    batch = concat([chunk.batch for chunk in engine.generate(request)])
    assert isinstance(batch, DiffusionBatch)
    rollout = RecordedRollout(request=request, batch=batch)
    if needs_means and batch.prev_sample_mean is None:
        raise ValueError(
            "the loss or the correction compares means, and the engine recorded none "
            "(prev_sample_mean): use another rollout.name, or "
            "algorithm.rollout_correction.centered=false and "
            f"actor.diffusion_loss.loss_mode={DiffusionLossConfig.loss_mode}"
        )
    require_finite(rollout, rollout.recorded, "engine", "rollout.dtype")
    return rollout


def require_finite(rollout: RecordedRollout, log_probs: Tensor, whose: str, key: str) -> None:
    """Raises ValueError if some log-prob [B, T] is not finite; names its owner and a setting."""
    broken = ~log_probs.isfinite()
    if broken.any():
        steps = sorted(set(rollout.batch.step_indices[broken].tolist()))
        raise ValueError(
            f"{int(broken.sum())} of {broken.numel()} log-probs of the {whose} are nan or inf, at "
            f"steps {steps} of the schedule; see {key} (fp16 overflows early), the weights, and "
            "whether rollout.algo.sde_window_range holds a step without noise"
        )


class Copy:
    """The trainer's network in another precision, which replays what an engine recorded, in batches
    of `rows` samples, as the engine has them, with those of the rollout's `options` that change the
    weights.
    """

    def __init__(
        self,
        model: FlowModel,
        dtype: str,
        rows: int,
        options: Sequence[RolloutOption] = (),
    ) -> None:
        weights = [option for option in options if type(option) in ReplicaEngine.options]
        self.replica = Replica(model.network, dtype, weights)
        self.policy = FlowPolicy(model, self.replica.network)
        self.model = model
        self.precision = self.replica.precision
        self.rows = rows

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over LoRA tensors."""
        self.replica.sync(state)

    def log_probs(self, batch: DiffusionBatch) -> Tensor:
        """Returns the log-probs of recorded steps, [B, T]."""
        return self.policy.log_probs(batch, self.rows)


def mismatch_of(
    rollout: RecordedRollout, log_probs: Tensor, guidance: float, copy: Copy | None = None
) -> Mismatch:
    """Returns the trainer's log-probs [B, T] minus those of a copy, or of the engine itself."""
    sigmas = rollout.batch.sigmas[rollout.request.window[0]].tolist()
    sampler_log_probs = rollout.recorded if copy is None else copy.log_probs(rollout.batch)
    return Mismatch(
        guidance=guidance,
        precision=rollout.request.spec.dtype if copy is None else copy.precision,
        engine=copy is None,
        timesteps=[round(1000 * sigma) for sigma in sigmas],
        differences=log_probs.double() - sampler_log_probs.double(),
    )


def same_as_trainer(config: Config) -> str | None:
    """Returns the precision in which a copy is the trainer's network; None under autocast."""
    return config.model.dtype if config.trainer.mixed_precision == "no" else None


def unquantized(options: Sequence[RolloutOption]) -> list[RolloutOption]:
    """Returns the options of a rollout but for the quantization of its weights."""
    return [option for option in options if not isinstance(option, Quantized)]


def other_precisions(config: Config) -> list[str]:
    """Returns the precisions of further copies, none with larger weights than the trainer's."""
    known = (config.rollout.spec().dtype, same_as_trainer(config))
    size = DTYPES[config.model.dtype].itemsize
    return [name for name in PRECISIONS if name not in known and DTYPES[name].itemsize <= size]

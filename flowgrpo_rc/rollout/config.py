"""The settings of the rollout and their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.batch import SamplerSpec, TokenSpec
from flowgrpo_rc.core.schedule import SHARING, TAILS, kept_steps, window_bounds
from flowgrpo_rc.core.transition import CONVENTIONS, KINDS
from flowgrpo_rc.plugins import check_engine_name
from flowgrpo_rc.rollout.faster_dtype import AUTO
from flowgrpo_rc.rollout.quantization import precision

if TYPE_CHECKING:
    from flowgrpo_rc.models.base import FlowModel

PACKAGE = "flowgrpo_rc.rollout"
ROLLOUT_DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(kw_only=True)
class PipelineConfig:
    """Size, denoising steps and guidance of the rollout, in the pipeline's own words.

    height: of a picture, in pixels.
    width: of a picture, in pixels.
    num_inference_steps: denoising steps of a training sample.
    guidance_scale: of SD3 and Wan; of FLUX.1 it is an input of the transformer. 1 is no guidance.
    true_cfg_scale: the guidance of Qwen-Image, which must be given, and of FLUX.1 with a negative
        prompt. 1 is none.
    max_sequence_length: tokens of the prompt.
    num_frames: of a video; null for images.
    """

    height: int = 512
    width: int = 512
    num_inference_steps: int = 10
    guidance_scale: float = 4.5
    true_cfg_scale: float | None = None
    max_sequence_length: int = 128
    num_frames: int | None = None


@dataclass(kw_only=True)
class AlgoConfig:
    """The stochastic part of sampling.

    noise_level: how much noise a stochastic step adds.
    sde_type: which process a stochastic step follows.
    log_prob_convention: `gaussian` is the density; `peers`, for cps only, leaves out 1 / (2 s^2),
        as other systems do.
    sde_window_size: how many consecutive steps are stochastic and trained; null: the whole range.
    sde_window_range: [first, last) of the steps that the window is drawn from; null: all but the
        last step.
    window_sharing: who has the same window: all samples of a step, those of a prompt, or nobody.
    tail: solver of the ODE steps behind `sde_window_range`: `euler` as in the stock pipeline, or
        `ab2`, Adams-Bashforth of order 2.
    tail_steps: the most evaluations behind `sde_window_range`; null: all that the schedule has
        there.
    shared_prefix: the samples of a prompt start from the same noise, and differ by the noise of
        their SDE windows alone. What they have in common is evaluated once.
    """

    noise_level: float = 0.7
    sde_type: str = "sde"
    log_prob_convention: str = "gaussian"
    sde_window_size: int | None = None
    sde_window_range: list[int] | None = None
    window_sharing: str = "group"
    tail: str = "euler"
    tail_steps: int | None = None
    shared_prefix: bool = False


@dataclass(kw_only=True)
class EvaluationConfig:
    """Settings of held-out samples, whose seed is fixed. Images come from the ODE, with their own
    steps and guidance.

    num_inference_steps: denoising steps of a held-out image.
    guidance_scale: as in rollout.pipeline.
    true_cfg_scale: as in rollout.pipeline; null takes that of rollout.pipeline.
    temperature: of held-out text; 0 takes the likeliest token.
    n: how many prompts of the file are used; null: all.
    batch_size: held-out samples made at once.
    seed: of the held-out samples' noise.
    """

    num_inference_steps: int = 40
    guidance_scale: float = 4.5
    true_cfg_scale: float | None = None
    temperature: float = 0.0
    n: int | None = None
    batch_size: int = 16
    seed: int = 42


@dataclass(kw_only=True)
class RolloutConfig:
    """Settings of training samples. Images are made by `pipeline` and `algo`, text by the
    temperature and the lengths.

    name: the engine: a module of flowgrpo_rc.rollout, with or without the ending `_engine`, or the
        path of a class.
    n: samples of a prompt, its group.
    dtype: precision of the sampling weights; auto: fp32 or bf16, whichever multiplies faster on
        this machine. A run that goes on keeps the one it began with.
    quantization: of the frozen weights of the blocks, where the engine offers it: int8, int4, fp8,
        or int8_dynamic (inputs of layers, too).
    compile: torch.compile for the blocks, where the engine offers it.
    merge_lora: add the LoRA to the sampling weights, where the engine offers it: faster forwards,
        and weights that are rounded once more.
    staleness: sample up to this many steps ahead of training, with weights that are as many steps
        older.
    reuse: train on the samples of so many earlier steps again, after those of a step itself.
    micro_batch_size_per_gpu: samples per forward of one process; null: as the actor's, which keeps
        the replay aligned.
    calculate_log_probs: record the log-probs of the rollout; false is refused, since nothing could
        be corrected.
    temperature: of training text.
    prompt_length: of text, in tokens; a longer prompt is an error.
    response_length: of text, in tokens; a longer response is cut.
    engine_kwargs: further options of the engine.
    workers: sample in so many processes of their own, through Ray; 0: in the trainer's process.
    cpus_per_worker: cores that each of them has, and threads of torch.
    gpus_per_worker: GPUs that each has, or a share of one; null: where the trainer has a GPU, 1 or
        what the engine spans.
    ray_address: of a running Ray cluster; null: one on this machine, for this run alone.
    worker_timeout_s: the longest time to load, or for a chunk; then the worker is given up.
    max_restarts: how often workers are started again in place of lost ones, all together.
    """

    name: str = "diffusers_engine"
    n: int = 24
    dtype: str = "bf16"
    quantization: str | None = None
    compile: bool = False
    merge_lora: bool = False
    staleness: int = 0
    reuse: int = 0
    micro_batch_size_per_gpu: int | None = None
    calculate_log_probs: bool = True
    temperature: float = 1.0
    prompt_length: int = 512
    response_length: int = 512
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    cpus_per_worker: int = 1
    gpus_per_worker: float | None = None
    ray_address: str | None = None
    worker_timeout_s: float = 1200.0
    max_restarts: int = 3
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    val_kwargs: EvaluationConfig = field(default_factory=EvaluationConfig)

    def spec(self) -> SamplerSpec:
        """Returns the sampler of training rollouts."""
        return SamplerSpec(
            height=self.pipeline.height,
            width=self.pipeline.width,
            num_inference_steps=self.pipeline.num_inference_steps,
            guidance_scale=self.pipeline.guidance_scale,
            noise_level=self.algo.noise_level,
            sde_type=self.algo.sde_type,
            log_prob_convention=self.algo.log_prob_convention,
            max_sequence_length=self.pipeline.max_sequence_length,
            true_cfg_scale=self.pipeline.true_cfg_scale,
            num_frames=self.pipeline.num_frames,
            dtype=precision(self.dtype, self.quantization),
            tail=self.algo.tail,
            tail_start=self.tail_start(),
            tail_steps=self.algo.tail_steps,
            shared_prefix=self.algo.shared_prefix,
        )

    def held_out_spec(self) -> SamplerSpec:
        """Returns the sampler of evaluation: the ODE, in the trainer's own precision."""
        held_out = self.val_kwargs
        true_cfg_scale = held_out.true_cfg_scale
        if true_cfg_scale is None:
            true_cfg_scale = self.pipeline.true_cfg_scale
        return replace(
            self.spec(),
            num_inference_steps=held_out.num_inference_steps,
            guidance_scale=held_out.guidance_scale,
            true_cfg_scale=true_cfg_scale,
            noise_level=0.0,
            sde_type="sde",
            log_prob_convention="gaussian",
            dtype="",
            tail="euler",
            tail_start=None,
            tail_steps=None,
            shared_prefix=False,
        )

    def check_model(self, model: type[FlowModel]) -> None:
        """Raises ValueError for a setting that the model ignores, and for one that it lacks."""
        _check_guidance(model, self.pipeline, PipelineConfig().guidance_scale, "rollout.pipeline")
        _check_guidance(
            model, self.val_kwargs, EvaluationConfig().guidance_scale, "rollout.val_kwargs"
        )
        pipeline = self.pipeline
        name = model.pipeline_class
        only_true_cfg = model.cfg_key == "true_cfg_scale" and not model.embeds_guidance
        if only_true_cfg and pipeline.true_cfg_scale is None:
            raise ValueError(
                f"rollout.pipeline.true_cfg_scale is not set, and {name} has no other guidance: "
                "give 1 (none) or more"
            )
        if model.makes == "video" and pipeline.num_frames is None:
            raise ValueError(
                f"rollout.pipeline.num_frames is not set, and {name} makes videos: give their "
                "length"
            )
        if model.makes == "image" and pipeline.num_frames is not None:
            raise ValueError(
                f"rollout.pipeline.num_frames={pipeline.num_frames} has no effect: {name} makes "
                "images"
            )
        if not 0 <= pipeline.max_sequence_length <= model.max_sequence_length:
            raise ValueError(
                f"rollout.pipeline.max_sequence_length={pipeline.max_sequence_length}: {name} "
                f"takes 0 to {model.max_sequence_length} tokens"
            )

    def token_spec(self) -> TokenSpec:
        """Returns the sampler of training rollouts of text."""
        return TokenSpec(
            dtype=precision(self.dtype, self.quantization),
            temperature=self.temperature,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )

    def window(self) -> tuple[int, int, int]:
        """Returns (size, first, last) of the SDE window, in steps.

        Raises:
          ValueError: the window does not fit the schedule.
        """
        algo = self.algo
        steps = self.pipeline.num_inference_steps
        return window_bounds(steps, algo.sde_window_size, algo.sde_window_range, algo.sde_type)

    def tail_start(self) -> int | None:
        """Returns the first step behind every window if the tail differs from the stock one."""
        algo = self.algo
        stock = algo.tail == "euler" and algo.tail_steps is None
        return None if stock else self.window()[2]

    def evaluations(self) -> int:
        """Returns how many denoising steps of a training sample are evaluated."""
        steps = self.pipeline.num_inference_steps
        return len(kept_steps(steps, self.tail_start(), self.algo.tail_steps))

    def validate(self) -> None:
        """Raises ValueError, naming key, value and what is allowed, for a setting out of range."""
        check_engine_name(PACKAGE, self.name, "rollout.name")
        _one_of("rollout.dtype", self.dtype, (*ROLLOUT_DTYPES, AUTO))
        if self.staleness < 0:
            raise ValueError(f"rollout.staleness={self.staleness}: give 0 or more steps")
        if self.reuse < 0:
            raise ValueError(f"rollout.reuse={self.reuse}: give 0 or more steps")
        self._check_workers()
        self._check_text()
        _one_of("rollout.algo.sde_type", self.algo.sde_type, KINDS)
        _one_of("rollout.algo.log_prob_convention", self.algo.log_prob_convention, CONVENTIONS)
        _one_of("rollout.algo.window_sharing", self.algo.window_sharing, SHARING)
        if self.algo.log_prob_convention == "peers" and self.algo.sde_type != "cps":
            raise ValueError(
                "rollout.algo.log_prob_convention=peers exists for rollout.algo.sde_type=cps only"
            )
        if self.n < 2:
            raise ValueError(f"rollout.n={self.n}: a group needs at least 2 samples to compare")
        upper = 1.0 if self.algo.sde_type == "cps" else float("inf")
        if not 0 < self.algo.noise_level <= upper:
            raise ValueError(
                f"rollout.algo.noise_level={self.algo.noise_level}: give a number above 0"
                + (" and at most 1 for cps" if upper == 1 else "")
            )
        held_out = self.val_kwargs
        if held_out.batch_size < 1 or (held_out.n is not None and held_out.n < 1):
            raise ValueError(
                f"rollout.val_kwargs.batch_size={held_out.batch_size} and "
                f"rollout.val_kwargs.n={held_out.n}: give at least 1 (n: or null for all prompts)"
            )
        self._check_steps()
        if not self.calculate_log_probs:
            raise ValueError(
                "rollout.calculate_log_probs=false leaves nothing to correct with, in bypass mode "
                "not even an old policy: set it to true"
            )
        self.window()
        self._check_tail()

    def _check_workers(self) -> None:
        least = {"workers": 0, "cpus_per_worker": 1, "max_restarts": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"rollout.{name}={getattr(self, name)}: give at least {smallest}")
        gpus = self.gpus_per_worker
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus % 1)):
            raise ValueError(
                f"rollout.gpus_per_worker={gpus}: give 0, a share of a GPU, or whole ones"
            )
        if not 0 < self.worker_timeout_s < math.inf:
            raise ValueError(
                f"rollout.worker_timeout_s={self.worker_timeout_s}: give a number of seconds above "
                "0"
            )
        if self.workers == 0 and self.ray_address is not None:
            raise ValueError(
                f"rollout.ray_address={self.ray_address} has no effect without workers: set "
                "rollout.workers, or drop it"
            )

    def _check_tail(self) -> None:
        algo = self.algo
        _one_of("rollout.algo.tail", algo.tail, TAILS)
        length = self.pipeline.num_inference_steps - self.window()[2]
        if algo.tail != "euler" and length == 0:
            raise ValueError(
                f"rollout.algo.tail={algo.tail} has no effect: no step lies behind "
                "rollout.algo.sde_window_range; end the range earlier"
            )
        if algo.tail_steps is not None and algo.tail_steps < 1:
            raise ValueError(
                f"rollout.algo.tail_steps={algo.tail_steps}: give at least 1 evaluation, or null "
                "for those of the schedule"
            )
        if algo.shared_prefix and algo.window_sharing == "sample":
            raise ValueError(
                "rollout.algo.shared_prefix=true needs samples of a prompt with the same window: "
                "set rollout.algo.window_sharing to group or batch"
            )

    def _check_text(self) -> None:
        if not 0 < self.temperature < math.inf or not 0 <= self.val_kwargs.temperature < math.inf:
            raise ValueError(
                f"rollout.temperature={self.temperature}, "
                f"rollout.val_kwargs.temperature={self.val_kwargs.temperature}: give a number "
                "above 0; held-out text may take 0, the likeliest token"
            )
        if self.prompt_length < 1 or self.response_length < 1:
            raise ValueError(
                f"rollout.prompt_length={self.prompt_length}, "
                f"rollout.response_length={self.response_length}: give at least 1 token"
            )

    def _check_steps(self) -> None:
        for key, pipeline in (("pipeline", self.pipeline), ("val_kwargs", self.val_kwargs)):
            if pipeline.num_inference_steps < 1:
                raise ValueError(
                    f"rollout.{key}.num_inference_steps={pipeline.num_inference_steps}: give at "
                    "least 1"
                )
            for name, scale in (
                ("guidance", pipeline.guidance_scale),
                ("true_cfg", pipeline.true_cfg_scale),
            ):
                if scale is not None and scale < 1:
                    raise ValueError(f"rollout.{key}.{name}_scale={scale}: give 1 (none) or more")
        if self.pipeline.num_inference_steps < 2:
            raise ValueError(
                "rollout.pipeline.num_inference_steps=1 leaves no stochastic step: give at least 2"
            )
        if self.pipeline.num_frames is not None and self.pipeline.num_frames < 1:
            raise ValueError(
                f"rollout.pipeline.num_frames={self.pipeline.num_frames}: give at least 1, or null"
            )


def _check_guidance(
    model: type[FlowModel], given: PipelineConfig | EvaluationConfig, default_scale: float, key: str
) -> None:
    """Refuses a guidance scale that the model does not use, unless it is the default."""
    used = f"the guidance of {model.pipeline_class} is {key}.{model.cfg_key}"
    if model.cfg_key != "true_cfg_scale" and given.true_cfg_scale not in (None, 1):
        raise ValueError(f"{key}.true_cfg_scale={given.true_cfg_scale} has no effect: {used}")
    uses_guidance_scale = model.cfg_key == "guidance_scale" or model.embeds_guidance
    if not uses_guidance_scale and given.guidance_scale not in (1, default_scale):
        raise ValueError(f"{key}.guidance_scale={given.guidance_scale} has no effect: {used}")


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: allowed are {', '.join(allowed)}")

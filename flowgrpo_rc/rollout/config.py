"""The settings of the rollout and their checks."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from flowgrpo_rc.batch import SamplerSpec, TokenSpec
from flowgrpo_rc.core.schedule import SHARING, TAILS, kept_steps, sliding_start, window_bounds
from flowgrpo_rc.core.transition import CONVENTIONS, KINDS
from flowgrpo_rc.models.quantization import precision
from flowgrpo_rc.plugins import check_choice, check_engine_name, check_least
from flowgrpo_rc.rollout.devices import AUTO
from flowgrpo_rc.rollout.options.cached_blocks import CachedBlocks
from flowgrpo_rc.rollout.options.compiled import Compiled
from flowgrpo_rc.rollout.options.drawing import Redraw, SharedPrefix
from flowgrpo_rc.rollout.options.merged_lora import MergedLora, RoundedLora
from flowgrpo_rc.rollout.options.option import RolloutOption
from flowgrpo_rc.rollout.options.quantized import NAMES, Quantized

PACKAGE = "flowgrpo_rc.rollout"
ROUNDED = "rounded"  # a LoRA that is apart, in the rollout's precision

# The least value of settings that are numbers, by their keys in `rollout`. Each may also be null if
# that is its default.
LEAST = {
    "n": 2,  # a group compares its samples
    "micro_batch_size_per_gpu": 1,
    "staleness": 0,
    "prompt_length": 1,
    "response_length": 1,
    "workers": 0,
    "cpus_per_worker": 1,
    "max_restarts": 0,
    "pipeline.num_inference_steps": 2,  # the last step is never stochastic
    "pipeline.guidance_scale": 0,
    "pipeline.true_cfg_scale": 0,
    "pipeline.guidance_scale_2": 0,
    "pipeline.num_frames": 1,
    "pipeline.condition_images": 0,
    "pipeline.condition_pixels": 1,
    "algo.sde_window_interval": 1,
    "algo.tail_steps": 1,
    "cache.every": 1,
    "val_kwargs.num_frames": 1,
    "val_kwargs.num_inference_steps": 1,
    "val_kwargs.guidance_scale": 0,
    "val_kwargs.true_cfg_scale": 0,
    "val_kwargs.guidance_scale_2": 0,
    "val_kwargs.n": 1,
    "val_kwargs.batch_size": 1,
}
# The keys of `val_kwargs` that say how an image or a video is sampled; the first four are whole.
SAMPLED = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "guidance_scale_2",
)
# The values of settings that are words.
ALLOWED = {
    "dtype": ("fp32", "bf16", "fp16", "fp64", AUTO),
    "algo.sde_type": KINDS,
    "algo.log_prob_convention": CONVENTIONS,
    "algo.window_sharing": SHARING,
    "algo.tail": TAILS,
}


@dataclass(kw_only=True)
class PipelineConfig:
    """Size, denoising steps and guidance of the rollout, in the pipeline's own words.

    height: of a picture, in pixels.
    width: of a picture, in pixels.
    num_inference_steps: denoising steps of a training sample.
    guidance_scale: of SD3, Sana, Wan and Z-Image; of FLUX.1 it is an input of the transformer. 1 is
        no guidance, but for Z-Image, whose scale starts at 0.
    true_cfg_scale: the guidance of Qwen-Image, which must be given, and of FLUX.1 with a negative
        prompt. 1 is none.
    guidance_scale_2: of the second transformer, for models that have two, as Wan 2.2 A14B has; null
        takes guidance_scale.
    max_sequence_length: tokens of the prompt; a longer one is cut, and a warning counts such. One
        whose target lies behind the cut is refused.
    num_frames: of a video; null for images.
    condition_images: the most images that a prompt brings to be edited, at least one; 0: prompts
        are text alone.
    condition_pixels: the area that the model gets a condition image in: FLUX.2 reduces larger ones
        to it, Qwen-Image-Edit brings all to it.
    """

    height: int = 512
    width: int = 512
    num_inference_steps: int = 10
    guidance_scale: float = 4.5
    true_cfg_scale: float | None = None
    guidance_scale_2: float | None = None
    max_sequence_length: int = 128
    num_frames: int | None = None
    condition_images: int = 0
    condition_pixels: int = 1024 * 1024


@dataclass(kw_only=True)
class AlgoConfig:
    """The stochastic part of sampling.

    noise_level: how much noise a stochastic step adds.
    sde_type: which process a stochastic step follows.
    log_prob_convention: `gaussian` is the density; `peers`, for cps only, leaves out 1 / (2 s^2),
        as other systems do.
    sde_window_size: how many consecutive steps are stochastic and trained; null: the whole range;
        0: none, for a loss that trains on finished samples, which the ODE makes.
    sde_window_range: [first, last) of the steps that the window is drawn from; null: all but the
        last step.
    sde_window_interval: MixGRPO's sliding window: it begins with the range, and moves on after so
        many training steps, and at the end of the range starts anew; null: it is drawn.
    window_sharing: who has the same window: all samples of a step, those of a prompt, or nobody.
    tail: solver of the ODE steps behind `sde_window_range`, or behind a sliding window: `euler` as
        in the stock pipeline, or `ab2`, Adams-Bashforth of order 2.
    tail_steps: the most evaluations there; null: all that the schedule has.
    shared_prefix: the samples of a prompt start from the same noise, and differ by the noise of
        their SDE windows alone. What they have in common is evaluated once.
    """

    noise_level: float = 0.7
    sde_type: str = "sde"
    log_prob_convention: str = "gaussian"
    sde_window_size: int | None = None
    sde_window_range: list[int] | None = None
    sde_window_interval: int | None = None
    window_sharing: str = "group"
    tail: str = "euler"
    tail_steps: int | None = None
    shared_prefix: bool = False


@dataclass(kw_only=True)
class CacheConfig:
    """Reuse of a transformer's blocks, but for the first and the last, while training samples are
    drawn: on some steps what they added at an earlier one is added again (`models.block_cache`).

    every: one of so many steps evaluates all blocks; 1: every step does.
    window: the steps of `sde_window_range` may be cached, too. Then the mismatch grows, which needs
        centered log-ratios and clip_ratio=auto. Otherwise only the images change.
    """

    every: int = 1
    window: bool = False


@dataclass(kw_only=True)
class EvaluationConfig:
    """Settings of held-out samples, whose seed is fixed. Images come from the ODE, with their own
    size, steps and guidance; null takes the value of rollout.pipeline.

    height: of a held-out picture, in pixels; condition images take
        rollout.pipeline.condition_pixels, as in training.
    width: of a held-out picture, in pixels.
    num_frames: of a held-out video.
    num_inference_steps: denoising steps of a held-out image.
    guidance_scale: as in rollout.pipeline.
    true_cfg_scale: as in rollout.pipeline.
    guidance_scale_2: as in rollout.pipeline.
    temperature: of held-out text; 0 takes the likeliest token.
    n: how many prompts of the file are used; null: all.
    batch_size: held-out samples made at once.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = 40
    guidance_scale: float | None = 4.5
    true_cfg_scale: float | None = None
    guidance_scale_2: float | None = None
    temperature: float = 0.0
    n: int | None = None
    batch_size: int = 16


@dataclass(kw_only=True)
class RolloutConfig:
    """Settings of training samples. Images are made by `pipeline` and `algo`, text by the
    temperature and the lengths.

    name: the engine: a module of flowgrpo_rc.rollout, with or without the ending `_engine`, or the
        path of a class.
    n: samples of a prompt, its group.
    dtype: precision of the sampling weights; auto: bf16 on a GPU and on a CPU with units for it
        (AVX512_BF16, AMX), else fp32. A run that goes on keeps the one it began with.
    quantization: of the frozen weights of the blocks, where the engine offers it: int8, int4, fp8,
        or int8_dynamic (inputs of layers, too).
    compile: torch.compile for the blocks, where the engine offers it. torch keeps compiled code in
        TORCHINDUCTOR_CACHE_DIR.
    redraw: draw the actor.train_n samples of a prompt that are trained on again, in the trainer's
        precision and with all blocks, from the same noise, and score them again; the rollout only
        chooses them.
    merge_lora: add the LoRA to the sampling weights, where the engine offers it: faster forwards,
        and weights that are rounded once more; null: if that is possible, costs no precision
        (model.dtype is not bf16). `rounded`: it stays apart and is in `dtype`, too, where it
        would be fp32 since training shares its bf16 weights.
    staleness: sample up to this many steps ahead of training, with weights that are as many steps
        older.
    micro_batch_size_per_gpu: samples per forward of one process; null: as the actor's, so
        that equal precisions give equal bits.
    temperature: of training text.
    prompt_length: of text, in tokens, the chat template included; a longer prompt is an error.
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
    redraw: bool = False
    merge_lora: bool | str | None = False
    staleness: int = 0
    micro_batch_size_per_gpu: int | None = None
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
    cache: CacheConfig = field(default_factory=CacheConfig)
    val_kwargs: EvaluationConfig = field(default_factory=EvaluationConfig)

    def spec(self, step: int = 1, *, tf32: bool = False) -> SamplerSpec:
        """Returns the sampler of a training step, the first of which is 1; a window may slide."""
        spec = SamplerSpec(
            **vars(self.pipeline),
            noise_level=self.algo.noise_level,
            sde_type=self.algo.sde_type,
            log_prob_convention=self.algo.log_prob_convention,
            dtype=precision(self.dtype, self.quantization),
            tf32=tf32 and self.dtype == "fp32",
            tail=self.algo.tail,
            tail_start=self.tail_start(step),
            tail_steps=self.algo.tail_steps,
        )
        for option in self.options(step):
            spec = option.spec(spec)
        return spec

    def options(self, step: int = 1) -> tuple[RolloutOption, ...]:
        """Returns what the settings choose for a training step, in the order of application."""
        merge, cache = self.merge_lora, self.cache
        chosen: list[RolloutOption] = []
        if merge:
            chosen.append(RoundedLora() if merge == ROUNDED else MergedLora())
        if self.quantization is not None:
            chosen.append(Quantized(self.quantization, self.dtype))
        if self.compile:
            chosen.append(Compiled())
        if cache.every > 1:
            chosen.append(CachedBlocks(cache.every, self.cached_steps(step), cache.window))
        if self.algo.shared_prefix:
            chosen.append(SharedPrefix())
        if self.redraw:
            chosen.append(Redraw())
        return tuple(chosen)

    def held_out_spec(self) -> SamplerSpec:
        """Returns the sampler of evaluation: the ODE, in the trainer's own precision."""
        values = {name: getattr(self.val_kwargs, name) for name in SAMPLED}
        changed = {name: value for name, value in values.items() if value is not None}
        return SamplerSpec(
            **vars(self.pipeline) | changed,
            noise_level=0.0,
            sde_type="sde",
            log_prob_convention="gaussian",
            dtype="",
        )

    def token_spec(self, *, tf32: bool = False) -> TokenSpec:
        """Returns the sampler of training rollouts of text."""
        return TokenSpec(
            dtype=precision(self.dtype, self.quantization),
            tf32=tf32 and self.dtype == "fp32",
            temperature=self.temperature,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )

    def window(self) -> tuple[int, int, int]:
        """Returns (size, first, last) of the SDE window. ValueError if it does not fit."""
        algo, steps = self.algo, self.pipeline.num_inference_steps
        if algo.sde_window_size == 0:
            return 0, 0, 0
        return window_bounds(steps, algo.sde_window_size, algo.sde_window_range, algo.sde_type)

    def window_at(self, step: int) -> tuple[int, int, int]:
        """Returns (size, first, last) of the windows of a step, the first of which is 1."""
        size, first, last = self.window()
        interval = self.algo.sde_window_interval
        if interval is None:
            return size, first, last
        start = sliding_start(step, size=size, first=first, last=last, interval=interval)
        return size, start, start + size

    def tail_start(self, step: int = 1) -> int | None:
        """Returns the first step behind every window of a step; None for the stock tail."""
        algo = self.algo
        stock = algo.tail == "euler" and algo.tail_steps is None
        return None if stock else self.window_at(step)[2]

    def evaluations(self, step: int = 1) -> int:
        """Returns how many denoising steps of a sample of a training step are evaluated."""
        steps = self.pipeline.num_inference_steps
        return len(kept_steps(steps, self.tail_start(step), self.algo.tail_steps))

    def cached_steps(self, step: int = 1) -> tuple[int, ...]:
        """Returns the evaluations of a sample of a training step that skip the middle blocks."""
        _, first, last = (0, 0, 0) if self.cache.window else self.window_at(step)
        every = self.cache.every
        return tuple(
            index
            for index in range(self.evaluations(step))
            if index % every and not first <= index < last
        )

    def validate(self) -> None:
        """Raises ValueError, naming key, value and what is allowed, for a setting out of range."""
        check_engine_name(PACKAGE, self.name, "rollout.name")
        if self.dtype in NAMES:
            raise ValueError(
                f"rollout.dtype={self.dtype} is a quantization: set rollout.quantization="
                f"{self.dtype}, on top of rollout.dtype, which may be {', '.join(ALLOWED['dtype'])}"
            )
        check_choice("rollout.quantization", self.quantization, (None, *NAMES))
        for key, allowed in ALLOWED.items():
            check_choice(f"rollout.{key}", attrgetter(key)(self), allowed)
        if self.merge_lora not in (None, True, False, ROUNDED):
            raise ValueError(
                f"rollout.merge_lora={self.merge_lora}: give true, false, null or {ROUNDED}"
            )
        for key, least in LEAST.items():
            check_least(f"rollout.{key}", attrgetter(key)(self), least)
        if not 0 < self.temperature < math.inf or not 0 <= self.val_kwargs.temperature < math.inf:
            raise ValueError(
                f"rollout.temperature={self.temperature}, "
                f"rollout.val_kwargs.temperature={self.val_kwargs.temperature}: give a number "
                "above 0; held-out text may take 0, the likeliest token"
            )
        images, pixels = self.pipeline.condition_images, self.pipeline.condition_pixels
        if images == 0 and pixels != PipelineConfig.condition_pixels:
            raise ValueError(
                f"rollout.pipeline.condition_pixels={pixels} has no effect without "
                "rollout.pipeline.condition_images"
            )
        if self.algo.log_prob_convention == "peers" and self.algo.sde_type != "cps":
            raise ValueError(
                "rollout.algo.log_prob_convention=peers exists for rollout.algo.sde_type=cps only"
            )
        upper = 1.0 if self.algo.sde_type == "cps" else float("inf")
        if not 0 < self.algo.noise_level <= upper:
            raise ValueError(
                f"rollout.algo.noise_level={self.algo.noise_level}: give a number above 0"
                + (" and at most 1 for cps" if upper == 1 else "")
            )
        self._check_workers()
        self.window()
        if self.algo.sde_window_size == 0:
            self._check_ode()
        if self.algo.sde_window_interval is not None:
            self._check_sliding()
        self._check_tail()
        self._check_cache()

    def _check_ode(self) -> None:
        """Refuses settings of stochastic steps, of which there are none."""
        for name, default in vars(AlgoConfig()).items():
            value = getattr(self.algo, name)
            if name not in ("sde_window_size", "tail") and value != default:
                raise ValueError(
                    f"rollout.algo.{name}={value} has no effect with rollout.algo.sde_window_size="
                    "0, where no step is stochastic: drop it, or give its default where a file "
                    f"sets it, rollout.algo.{name}={'null' if default is None else default}"
                )

    def _check_sliding(self) -> None:
        """Refuses settings of a sliding window that are wrong or have no effect."""
        algo = self.algo
        if algo.window_sharing != AlgoConfig.window_sharing:
            raise ValueError(
                f"rollout.algo.window_sharing={algo.window_sharing} has no effect: all samples "
                "share a sliding window (rollout.algo.sde_window_interval)"
            )
        size, first, last = self.window()
        if first + size >= last:
            raise ValueError(
                f"rollout.algo.sde_window_interval={algo.sde_window_interval} has no effect: a "
                f"window of {size} steps cannot move in rollout.algo.sde_window_range=[{first}, "
                f"{last}]"
            )

    def _check_workers(self) -> None:
        gpus = self.gpus_per_worker
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus % 1)):
            raise ValueError(
                f"rollout.gpus_per_worker={gpus}: give 0, a share of a GPU, or whole ones"
            )
        if not 0 < self.worker_timeout_s < math.inf:
            raise ValueError(
                f"rollout.worker_timeout_s={self.worker_timeout_s}: give seconds above 0"
            )
        if self.workers == 0 and self.ray_address is not None:
            raise ValueError(
                f"rollout.ray_address={self.ray_address} has no effect without rollout.workers"
            )

    def _check_cache(self) -> None:
        """Refuses settings of the block cache that are wrong or have no effect."""
        cache = self.cache
        if cache.every == 1 and cache.window:
            raise ValueError(
                "rollout.cache.window=true has no effect with every=1, which evaluates all blocks; "
                "set rollout.cache.every=2, or drop it"
            )
        if cache.every > 1 and not self.cached_steps():
            raise ValueError(
                f"rollout.cache.every={cache.every} has no effect: no step to skip lies outside of "
                "rollout.algo.sde_window_range; shorten it, give another number, or set "
                "rollout.cache.window=true"
            )

    def _check_tail(self) -> None:
        algo = self.algo
        length = self.pipeline.num_inference_steps - self.window_at(1)[2]
        if algo.tail != "euler" and length == 0:
            raise ValueError(
                f"rollout.algo.tail={algo.tail} has no effect: no step lies behind "
                "rollout.algo.sde_window_range"
            )

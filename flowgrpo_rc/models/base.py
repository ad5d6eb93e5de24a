"""A flow model as the trainer uses it: it encodes text, predicts velocities and decodes latents.

A model knows no algorithm. Each family of models has one file in this folder with one adapter,
which is found by the pipeline class of the checkpoint.

Legend: B samples, P prompts, S denoising steps, F frames, H and W height and width of a picture.
"""

from __future__ import annotations

import copy
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Protocol

import diffusers
import numpy as np
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
    SchedulerMixin,
)
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.core.schedule import kept_steps
from flowgrpo_rc.distributed.numerics import convolving_in_tf32
from flowgrpo_rc.libraries import unasked
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.index import DTYPES as DTYPES
from flowgrpo_rc.models.index import build_pipeline, component_dtype, components_in, read_index
from flowgrpo_rc.models.networks import Networks
from flowgrpo_rc.models.offload import Offloadable, keep_layers_on_host
from flowgrpo_rc.models.prompt_cache import PromptCache
from flowgrpo_rc.models.quantization import quantize_blocks
from flowgrpo_rc.models.schedule import Schedule as Schedule
from flowgrpo_rc.models.vae import keep_channels_last
from flowgrpo_rc.models.vae import to_uint8 as to_uint8
from flowgrpo_rc.plugins import concrete_subclasses, load_class
from flowgrpo_rc.reading import blaming, load_weights, loading

CPU = torch.device("cpu")


class TrainableModel(Protocol):
    """A model that a LoRA can be put on, by default on layers with these name endings."""

    device: torch.device
    default_target_modules: ClassVar[tuple[str, ...]]

    @property
    def network(self) -> nn.Module:
        """Returns the network that gets the LoRA."""


class FlowModel(ABC):
    """A loaded pipeline of one family of models.

    `network` is the base network. Methods that evaluate a network take it as an argument, since a
    rollout has a copy of its own. `check` and `latent_shape` need no weights: a pipeline of
    models on the meta device is enough.

    Args:
      pipeline: the stock pipeline with its models. They are frozen here.
      device: where the models compute.
      offload_idle: keep text encoders and VAE on the CPU while nobody uses them.
      offload_encoders: keep the text encoders there.
      decode_batch_size: samples that are decoded at once; None for all that are given.
    """

    pipeline_class: ClassVar[str]  # the class in the checkpoint's model_index.json
    # The pipeline's components that are trained, `transformer` first. Of the adapters for a class,
    # the one with most of a checkpoint's components is taken.
    networks: ClassVar[tuple[str, ...]] = ("transformer",)
    # Name endings of the linear layers that get a LoRA by default.
    default_target_modules: ClassVar[tuple[str, ...]]
    makes: ClassVar[str] = "image"  # what `decode` returns, "image" or "video"
    # The key of `rollout.pipeline` with the scale of classifier-free guidance, guidance_scale or
    # true_cfg_scale, and its value that stands for no guidance.
    cfg_key: ClassVar[str] = "guidance_scale"
    unguided_scale: ClassVar[float] = 1.0
    # Both prompts go through the transformer in one batch, the negative ones first; False: apart.
    guides_in_one_batch: ClassVar[bool] = False
    embeds_guidance: ClassVar[bool] = False  # the transformer also takes guidance_scale as an input
    # The fewest tokens that max_sequence_length may be set to, and the most of the stock pipeline.
    min_sequence_length: ClassVar[int] = 0
    max_sequence_length: ClassVar[int] = 512
    takes_images: ClassVar[bool] = False  # prompts may bring images, see `EditingModel`
    needs_images: ClassVar[bool] = False  # they have to
    # The transformer's setting that holds the width of embeddings of text.
    text_width_key: ClassVar[str] = "joint_attention_dim"
    # The text encoder gets a prompt in its chat template, with this enable_thinking; None: alone.
    thinking: ClassVar[bool | None] = None
    masks_text: ClassVar[bool] = False  # tokens have a mask: prompts may have several lengths
    pads_to_longest: ClassVar[bool] = False  # prompts are as long as the longest of their batch
    keeps_length: ClassVar[bool] = False  # the transformer gets no padding to max_sequence_length
    # Besides Euler's scheduler the stock pipeline takes solvers with use_flow_sigmas.
    takes_flow_solvers: ClassVar[bool] = False
    # diffusers documents the pipeline in bf16, VAE included, which then decodes in bf16 on a card.
    vae_in_bf16: ClassVar[bool] = False
    # What a checkpoint may lack, besides what the pipeline's class can do without.
    optional_components: ClassVar[tuple[str, ...]] = ()
    # Name in model_index.json -> why a checkpoint that has this component cannot be trained.
    unsupported_components: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        device: torch.device,
        *,
        offload_idle: bool = False,
        offload_encoders: bool = False,
        decode_batch_size: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.device = device
        self.prompt_cache: PromptCache | None = None  # keeps prompts; None: nothing that lasts
        modules = {
            name: component
            for name, component in pipeline.components.items()
            if isinstance(component, nn.Module)
        }
        for module in modules.values():
            module.requires_grad_(False).eval()
        trained = {name: getattr(pipeline, name).to(device) for name in self.networks}
        self._network = Networks(trained) if len(trained) > 1 else None
        encoders = [
            module for name, module in modules.items() if name not in (*self.networks, "vae")
        ]
        self._encoders = Offloadable(encoders, device, offload=offload_idle or offload_encoders)
        self._decode_batch_size = decode_batch_size
        if device.type == "cpu":
            keep_channels_last(modules["vae"])
        self._vae = Offloadable([modules["vae"]], device, offload=offload_idle)

    @property
    def transformer(self) -> ModelMixin:
        """Returns the transformer; the first one of several."""
        return self.pipeline.transformer

    @property
    def network(self) -> nn.Module:
        """Returns what gets the LoRA: the transformer, or `Networks` with all of them."""
        return self.transformer if self._network is None else self._network

    @property
    def scheduler(self) -> SchedulerMixin:
        """Returns a copy of the scheduler, since several threads set its timesteps."""
        return copy.copy(self.pipeline.scheduler)

    @classmethod
    def serves(cls) -> str:
        """Returns what the adapter is for: `WanPipeline`, `WanPipeline+transformer_2`."""
        return "+".join((cls.pipeline_class, *cls.networks[1:]))

    def networks_of_steps(self, spec: SamplerSpec) -> list[str]:
        """Returns which of `networks` computes each step, [S] (no weights needed)."""
        return [self.networks[0]] * spec.num_inference_steps

    @classmethod
    def cfg_scale(cls, spec: SamplerSpec) -> float:
        """Returns w of negative + w (positive - negative); above 1 a step evaluates both."""
        value: float | None = getattr(spec, cls.cfg_key)
        return 1.0 if value is None else value + (1.0 - cls.unguided_scale)

    @classmethod
    def cfg_value(cls, scale: float) -> float:
        """Returns the value of `cfg_key` that gives a scale; `cfg_scale` the other way round."""
        return scale + (cls.unguided_scale - 1.0)

    def encoders_at_work(self) -> AbstractContextManager[None]:
        """Has the text encoders on the device for several calls of `encode`."""
        return self._encoders.at_work()

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, max_sequence_length: int, negative: bool = False
    ) -> Conditioning:
        """Encodes P prompts of at most `max_sequence_length` tokens, maybe as negative ones."""
        encode = self._encode_negative if negative else self._encode
        with self.encoders_at_work():
            return encode(prompts, max_sequence_length=max_sequence_length)

    def templated(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        """Returns a prompt as the tokenizer of a text encoder gets it."""
        if self.thinking is None:
            return text
        with blaming("model.path: the chat template of its tokenizer"):
            templated: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self.thinking,
            )
            if text.strip() not in templated:
                raise ValueError(f"it drops the prompt {text[:60]!r}")
        return templated

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase, spec: SamplerSpec) -> int | None:
        """Returns how many tokens of a templated prompt are kept; None: it is not cut."""
        is_clip = type(tokenizer).__name__.startswith("CLIP")
        return int(tokenizer.model_max_length) if is_clip else spec.max_sequence_length

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: SamplerSpec) -> np.ndarray:
        """Decodes final latents to images [B, H, W, 3] or videos [B, F, H, W, 3], uint8."""
        size = self._decode_batch_size or len(latents)
        with self._vae.at_work(), convolving_in_tf32():
            decoded = [to_uint8(self._decode(rows, spec)) for rows in latents.split(size)]
        return np.concatenate(decoded)

    @abstractmethod
    def check(self, spec: SamplerSpec, key: str) -> None:
        """Raises ValueError if the checkpoint cannot make size or guidance of section `key`."""

    @abstractmethod
    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        """Encodes prompts for `encode`, which has put the text encoders on the device."""

    def _stock_encoding(self, prompts: Sequence[str], length: int, **options: object) -> Any:
        """Returns what the stock pipeline's `encode_prompt` gives for prompts of so many tokens."""
        return self.pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=length, **options
        )

    def _encode_negative(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        """Encodes negative prompts for `encode`, usually in the same way."""
        return self._encode(prompts, max_sequence_length=max_sequence_length)

    def blank_conditioning(self, count: int, spec: SamplerSpec) -> Conditioning:
        """Makes conditioning of the largest shape of prompts, to measure memory with."""
        config = self.transformer.config
        width = config[self.text_width_key]
        embeds = torch.empty(count, spec.max_sequence_length, width, dtype=self.transformer.dtype)
        pooled = None
        if config.get("pooled_projection_dim"):
            pooled = torch.empty(count, config["pooled_projection_dim"], dtype=embeds.dtype)
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool) if self.masks_text else None
        return Conditioning(embeds=embeds, pooled=pooled, mask=mask)

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns the shape of a sample's latents: channels, height, width unless overridden."""
        factor = self.pipeline.vae_scale_factor
        return self.transformer.config.in_channels, spec.height // factor, spec.width // factor

    def walked_schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns the steps of the schedule that a rollout walks; `tail_steps` may drop some."""
        schedule = self.schedule(spec)
        num_steps = len(schedule.timesteps)
        steps = kept_steps(num_steps, spec.tail_start, spec.tail_steps)
        return Schedule(schedule.sigmas[[*steps, num_steps]], schedule.timesteps[steps])

    @abstractmethod
    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns the sigmas and timesteps of the stock pipeline, bit for bit, on the device."""

    def check_scheduler(self, spec: SamplerSpec) -> None:
        """Raises ValueError unless the sigmas are those of a flow, falling from at most 1 to 0."""
        scheduler = self.pipeline.scheduler
        where = f"model.path: its scheduler, {type(scheduler).__name__},"
        settings = scheduler.config
        is_euler = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        is_solver = (
            settings.get("use_flow_sigmas") and settings.get("prediction_type") == "flow_prediction"
        )
        if not (
            (is_euler and not settings.get("stochastic_sampling"))
            or (self.takes_flow_solvers and is_solver)
        ):
            others = ", or a solver with use_flow_sigmas and prediction_type=flow_prediction"
            raise ValueError(
                f"{where} does not walk the sigmas of a flow as a {self.pipeline_class} needs: "
                "it takes FlowMatchEulerDiscreteScheduler without stochastic_sampling"
                f"{others if self.takes_flow_solvers else ''}"
            )
        # A model without weights is on the meta device, where sigmas have no values.
        on_cpu = copy.copy(self)
        on_cpu.device = CPU
        with blaming(where):
            sigmas = on_cpu.schedule(spec).sigmas
        if not (sigmas[0] <= 1 + 1e-6 and sigmas[-1] == 0 and (sigmas.diff() < 0).all()):
            raise ValueError(
                f"{where} walks the sigmas {', '.join(f'{value:.4g}' for value in sigmas[:4])} to "
                f"{sigmas[-1]:.4g}, and those of a flow fall from at most 1 to 0: correct "
                "invert_sigmas, final_sigmas_type or shift in its scheduler_config.json"
            )

    def check_decoding(self, spec: SamplerSpec) -> None:
        """Raises ValueError if a VAE on the meta device cannot decode what the model makes."""
        still = replace(spec, num_frames=spec.num_frames and 1)
        with torch.no_grad(), blaming("model.path: the settings of its vae"):
            self._decode(torch.empty(1, *self.latent_shape(still), device="meta"), still)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity as the stock pipeline does, classifier-free guidance included.

        Args:
          transformer: the network to evaluate, the base or a copy of it. A model with several
            transformers also takes one of them, which then has all timesteps to itself.
          latents: the state, [B, ...], fp32.
          timesteps: [B], as `schedule` has them.
          conditioning: the encoded prompt of each sample, [B].
          negative: the encoded negative prompt of each sample, [B]; None without guidance.
          spec: how to sample; the scale of the guidance is `cfg_scale(spec)`.

        Returns:
          The velocity, [B, ...], fp32; differentiable in the network's weights.
        """
        if negative is None:
            return self._predict(transformer, latents, timesteps, conditioning, spec)
        if self.guides_in_one_batch:
            # In the order of the stock pipelines: a row's last bits may depend on its place.
            both = Conditioning.join([negative, conditioning])
            x = torch.cat([latents] * 2)
            at = torch.cat([timesteps] * 2)
            unguided, guided = self._predict(transformer, x, at, both, spec).chunk(2)
        else:
            guided = self._predict(transformer, latents, timesteps, conditioning, spec)
            unguided = self._predict(transformer, latents, timesteps, negative, spec)
        return self._combine(guided, unguided, spec)

    def _predict(
        self, transformer: ModelMixin, x: Tensor, at: Tensor, text: Conditioning, spec: SamplerSpec
    ) -> Tensor:
        """Predicts the velocity of states `x` at timesteps `at` under one prompt each."""
        raise NotImplementedError(f"{type(self).__name__} defines neither velocity nor _predict")

    def _combine(self, guided: Tensor, unguided: Tensor, spec: SamplerSpec) -> Tensor:
        """Applies classifier-free guidance (https://arxiv.org/abs/2207.12598)."""
        return unguided + self.cfg_scale(spec) * (guided - unguided)

    @abstractmethod
    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        """Decodes for `decode` to [B, C, H, W] or [B, F, C, H, W], with values in [0, 1]."""


def adapter_of(config: ModelConfig) -> type[FlowModel]:
    """Finds a checkpoint's adapter by its model_index.json. ValueError if there is none."""
    index = read_index(config)
    adapters = adapters_by_pipeline() if config.adapter is None else _chosen_adapter(config.adapter)
    pipeline = str(index.get("_class_name"))
    components = components_in(index).keys()
    fitting = [
        adapter
        for adapter in adapters.values()
        if adapter.pipeline_class == pipeline and components >= {*adapter.networks[1:]}
    ]
    adapter = max(fitting, key=lambda adapter: len(adapter.networks), default=None)
    if adapter is None:
        known = "adapters exist" if config.adapter is None else f"model.adapter={config.adapter} is"
        faults = [f"is a {pipeline}; {known} for {', '.join(sorted(adapters))}"]
    else:
        parameters = signature(getattr(diffusers, pipeline)).parameters.values()
        needed = {p.name for p in parameters if p.default is p.empty} | {*adapter.networks}
        missing = sorted(needed - {*adapter.optional_components} - components)
        reasons = adapter.unsupported_components.items()
        faults = [f"has a {name}: {reason}" for name, reason in reasons if name in components]
        faults += [f"has no {name}, which a {pipeline} needs" for name in missing]
    if adapter is None or faults:
        raise ValueError(f"model.path={config.path} {faults[0]}")
    return adapter


def _chosen_adapter(path: str) -> dict[str, type[FlowModel]]:
    """Loads the adapter that `model.adapter` names, by what it serves."""
    try:
        adapter: type[FlowModel] = load_class("flowgrpo_rc.models", path, FlowModel)
    except ValueError as error:
        raise ValueError(f"model.adapter: {error}") from error
    return {adapter.serves(): adapter}


def adapters_by_pipeline() -> dict[str, type[FlowModel]]:
    """Imports every module of this folder and collects the adapters, by what they serve."""
    adapters: list[type[FlowModel]] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        imported = import_module(f"{__package__}.{module.name}")
        adapters += concrete_subclasses(imported, FlowModel)
    return {adapter.serves(): adapter for adapter in adapters}


def load_model(config: ModelConfig, device: torch.device) -> FlowModel:
    """Loads a pipeline through diffusers and wraps it in its adapter, without LoRA."""
    adapter = adapter_of(config)
    where = f"model.path={config.path}"
    with loading(where), unasked():
        folder = config.location()
        if not Path(folder).is_dir():
            folder = DiffusionPipeline.download(
                folder, use_safetensors=True, trust_remote_code=False
            )

        def load(name: str, cls: Any) -> Any:
            place = str(Path(folder, name))
            if issubclass(cls, ModelMixin | PreTrainedModel):
                dtype = component_dtype(config, name, device, stock_in_bf16=adapter.vae_in_bf16)
                return load_weights(cls, place, where, dtype=dtype)
            with loading(f"{where}: its {name}"):
                return cls.from_pretrained(place)

        pipeline = build_pipeline(config, load)
        # Where it came from, which an engine of its own loads again.
        pipeline.register_to_config(_name_or_path=config.location())
    pipeline.set_progress_bar_config(disable=True)
    streams = config.offload_idle == "layers"
    for name in adapter.networks:
        network = getattr(pipeline, name)
        if config.quantization is not None:
            quantize_blocks(network, config.quantization, CPU if streams else device)
        if streams:
            keep_layers_on_host(network, device)
    return adapter(
        pipeline,
        device,
        offload_idle=bool(config.offload_idle),
        offload_encoders=config.prompt_cache is not None and device.type != "cpu",
        decode_batch_size=config.decode_batch_size,
    )

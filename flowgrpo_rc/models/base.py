"""What a flow model is to the trainer: text to conditioning, state to velocity, latents to images.

A model knows no algorithm. One file in this folder is one adapter, found by the checkpoint's
pipeline class.
Legend: B samples, P prompts, C latent channels, H and W latent height and width.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.sharing import Shared
from flowgrpo_rc.plugins import load_class

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LORA_INITS = ("gaussian", "default")
_ABSENT = [None, None]  # how model_index.json writes a component that is not there
INDEX_FILES = {"diffusion": "model_index.json", "causal_lm": "config.json"}


@dataclass(kw_only=True)
class ModelConfig:
    """What is trained.

    kind: images and videos, or text.
    path: a local folder or a hub id.
    dtype: precision of the frozen weights (LoRA weights are fp32). `fp64`, LoRA included, is for
        exact comparisons on a CPU.
    lora_rank: inner dimension of the LoRA.
    lora_alpha: the LoRA is added with strength lora_alpha / lora_rank.
    lora_init: `gaussian` or the default of peft; either way the model starts unchanged.
    lora_path: an exported LoRA (folder or file) to start from.
    target_modules: name endings of the linear layers that get a LoRA; null takes the adapter's
        default.
    gradient_checkpointing: recompute activations in the backward pass: less memory, more time.
    adapter: the class of a flow model out of the tree, `my_module.MyModel`; null: that of the
        checkpoint's pipeline.
    offload_idle: text encoders and VAE are on the CPU while nobody uses them.
    """

    kind: str = "diffusion"
    path: str = ""
    dtype: str = "fp32"
    lora_rank: int = 32
    lora_alpha: int = 64
    lora_init: str = "gaussian"
    lora_path: str | None = None
    target_modules: list[str] | None = None
    gradient_checkpointing: bool = False
    offload_idle: bool = False
    adapter: str | None = None

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work; nothing is loaded."""
        if self.kind not in INDEX_FILES:
            raise ValueError(f"model.kind={self.kind!r}: allowed are {', '.join(INDEX_FILES)}")
        if self.dtype not in ("fp32", "bf16", "fp64"):
            raise ValueError(f"model.dtype={self.dtype!r}: allowed are fp32, bf16, fp64")
        if self.lora_rank < 1 or self.lora_alpha < 1:
            raise ValueError(
                f"model.lora_rank={self.lora_rank}, model.lora_alpha={self.lora_alpha}: give at "
                "least 1"
            )
        if self.lora_init not in LORA_INITS:
            raise ValueError(
                f"model.lora_init={self.lora_init!r}: allowed are {', '.join(LORA_INITS)}"
            )
        for given, setting in (
            (self.offload_idle, "model.offload_idle=true"),
            (self.adapter is not None, f"model.adapter={self.adapter}"),
        ):
            if given and self.kind != "diffusion":
                raise ValueError(f"{setting} has no effect with model.kind={self.kind}: drop it")
        if not self.path:
            raise ValueError("model.path is empty: give a local folder or a hub id")
        folder = Path(self.path).expanduser()
        if folder.exists():
            if not (folder / INDEX_FILES[self.kind]).is_file():
                raise ValueError(
                    f"model.path={self.path}: no {INDEX_FILES[self.kind]} there, so it is no "
                    "model of "
                    f"model.kind={self.kind}"
                )
        elif self.path.startswith((".", "/", "~")) or self.path.count("/") != 1:
            raise ValueError(
                f"model.path={self.path}: there is no such folder, and it has not the form of a "
                "hub id"
            )
        if self.lora_path is not None and not Path(self.lora_path).expanduser().exists():
            raise ValueError(f"model.lora_path={self.lora_path}: there is no such file or folder")


class Schedule(NamedTuple):
    """sigmas [S+1] fp32, ending in 0; timesteps [S] as the transformer receives them."""

    sigmas: Tensor
    timesteps: Tensor


class TrainableModel(Protocol):
    """What a LoRA needs to know: the network it is put on, and where."""

    device: torch.device
    default_target_modules: ClassVar[tuple[str, ...]]

    @property
    def network(self) -> Any: ...


class FlowModel(ABC):
    """A loaded pipeline. `transformer` is the base network; callers pass the copy they want
    evaluated.

    `check` and `latent_shape` need no weights: a pipeline of models on the meta device will do.

    pipeline_class: the class in the checkpoint's model_index.json.
    makes: what `decode` returns, "image" or "video".
    cfg_key: the key of `rollout.pipeline` that is the scale of classifier-free guidance,
        guidance_scale or true_cfg_scale.
    embeds_guidance: the transformer takes guidance_scale as an input, besides.
    max_sequence_length: the most tokens of a prompt that the stock pipeline allows.
    unsupported_components: name in model_index.json -> why a checkpoint that has it cannot be
        trained.
    """

    pipeline_class: ClassVar[str]
    default_target_modules: ClassVar[tuple[str, ...]]
    makes: ClassVar[str] = "image"
    cfg_key: ClassVar[str] = "guidance_scale"
    embeds_guidance: ClassVar[bool] = False
    max_sequence_length: ClassVar[int] = 512
    unsupported_components: ClassVar[Mapping[str, str]] = {}

    def __init__(self, pipeline: Any, device: torch.device, *, offload_idle: bool = False) -> None:
        self.pipeline = pipeline
        self.device = device
        modules = {
            name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)
        }
        for module in modules.values():
            module.requires_grad_(False).eval()
        self.transformer.to(device)
        encoders = [
            module for name, module in modules.items() if name not in ("transformer", "vae")
        ]
        self._encoders = Shared(encoders, device, offload=offload_idle)
        self._vae = Shared([modules["vae"]], device, offload=offload_idle)

    @property
    def transformer(self) -> Any:
        return self.pipeline.transformer

    @property
    def network(self) -> Any:
        return self.transformer

    @property
    def scheduler(self) -> Any:
        """A copy, since setting the timesteps changes it, and several threads do."""
        return copy.copy(self.pipeline.scheduler)

    @classmethod
    def cfg_scale(cls, spec: SamplerSpec) -> float:
        """Scale of classifier-free guidance; above 1 it takes a negative prompt and a second
        evaluation.
        """
        scale: float | None = getattr(spec, cls.cfg_key)
        return 1.0 if scale is None else scale

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        """Conditioning of P prompts."""
        with self._encoders.at_work():
            return self._encode(prompts, max_sequence_length=max_sequence_length)

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: SamplerSpec) -> np.ndarray:
        """Images [B, H, W, 3] or videos [B, F, H, W, 3] uint8 of final latents, as the stock
        pipeline gives them.
        """
        with self._vae.at_work():
            return self._decode(latents, spec)

    @abstractmethod
    def check(self, spec: SamplerSpec, key: str) -> None:
        """ValueError for a size or a guidance that this checkpoint cannot make; `key` is where they
        were given.
        """

    @abstractmethod
    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        """What `encode` returns; the text encoders are on the device."""

    @abstractmethod
    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Shape of one sample's latents, as the stock pipeline takes them."""

    @abstractmethod
    def schedule(self, spec: SamplerSpec) -> Schedule:
        """The sigmas and timesteps that the stock pipeline would use, bit for bit."""

    @abstractmethod
    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Velocity [B, ...] in fp32 at `latents` [B, ...] fp32 and `timesteps` [B].

        With `negative` it is guided by `cfg_scale(spec)`, as in the stock pipeline.
        """

    @abstractmethod
    def _decode(self, latents: Tensor, spec: SamplerSpec) -> np.ndarray:
        """What `decode` returns; the VAE is on the device."""


def adapter_of(config: ModelConfig) -> type[FlowModel]:
    """The adapter for the checkpoint at `config.path`, from its model_index.json alone.

    Raises ValueError for a folder that cannot be read, a pipeline class without adapter (or with
    another than `config.adapter`'s), or a component that the adapter does not know what to do with.
    """
    index = _read_index(config)
    adapters = adapters_by_pipeline() if config.adapter is None else _named_adapter(config.adapter)
    adapter = adapters.get(index["_class_name"])
    if adapter is None:
        raise ValueError(
            f"model.path={config.path} is a {index['_class_name']}; "
            f"{'adapters exist' if config.adapter is None else f'model.adapter={config.adapter} is'} "
            f"for {', '.join(sorted(adapters))}"
        )
    for name, reason in adapter.unsupported_components.items():
        if index.get(name, _ABSENT) != _ABSENT:
            raise ValueError(f"model.path={config.path} has a {name}: {reason}")
    return adapter


def absent_components(config: ModelConfig) -> list[str]:
    """The components of its pipeline that the checkpoint at `config.path` lacks, from its
    model_index.json alone.
    """
    return [name for name, value in _read_index(config).items() if value == _ABSENT]


def load_model(config: ModelConfig, device: torch.device) -> FlowModel:
    """Load the pipeline through diffusers and wrap it in the adapter for its class.

    The transformer and the text encoders take `config.dtype`; the VAE stays fp32, since SD3's
    overflows in half precision. Raises ValueError as `adapter_of` does.
    """
    adapter, path, absent = (
        adapter_of(config),
        _path(config),
        dict.fromkeys(absent_components(config)),
    )
    dtypes = {"default": DTYPES[config.dtype], "vae": torch.float32}
    pipeline = DiffusionPipeline.from_pretrained(path, dtype=dtypes, use_safetensors=True, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return adapter(pipeline, device, offload_idle=config.offload_idle)


def adapters_by_pipeline() -> dict[str, type[FlowModel]]:
    """Pipeline class -> adapter, of every module in this folder."""
    package = importlib.import_module("flowgrpo_rc.models")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"flowgrpo_rc.models.{module.name}")
    ours = [
        adapter
        for adapter in FlowModel.__subclasses__()
        if adapter.__module__.startswith(f"{package.__name__}.")
    ]
    return {adapter.pipeline_class: adapter for adapter in ours}


def _named_adapter(name: str) -> dict[str, type[FlowModel]]:
    try:
        adapter: type[FlowModel] = load_class("flowgrpo_rc.models", name, FlowModel)
    except ValueError as error:
        raise ValueError(f"model.adapter: {error}") from error
    return {adapter.pipeline_class: adapter}


def _path(config: ModelConfig) -> str:
    folder = Path(config.path).expanduser()
    return str(folder) if folder.exists() else config.path


def _read_index(config: ModelConfig) -> dict[str, Any]:
    """model_index.json."""
    try:
        return dict(DiffusionPipeline.load_config(_path(config)))
    except OSError as error:
        raise ValueError(
            f"model.path={config.path}: cannot be read as a diffusers pipeline: {error}"
        ) from error

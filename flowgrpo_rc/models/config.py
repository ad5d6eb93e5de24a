"""The settings of the model and their checks. They import no library of models."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.quantization import GROUPS
from flowgrpo_rc.plugins import check_choice, check_least

# Endings of files that hold the weights of a whole model, which other programs load.
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".bin", ".gguf")
# Arguments of apply_chat_template that are no options of the template.
_TOKENIZING = (
    *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
# The file by which a checkpoint of each kind is known.
INDEX_FILES = {"diffusion": "model_index.json", "causal_lm": "config.json"}


@dataclass(kw_only=True)
class ModelConfig:
    """The model to train, and its LoRA.

    kind: `diffusion` for images and videos, `causal_lm` for text.
    path: a local folder or a hub id.
    dtype: precision of the frozen weights. The LoRA is fp32; with `fp64`, which is for exact
        comparisons on a CPU, it is fp64 too.
    quantization: of the frozen weights of the blocks, for training and the rollouts that copy
        them: int8, int4 or nf4, 4 bits on the scale of a normal distribution; null for none.
    lora_rank: inner dimension of the LoRA.
    lora_alpha: the LoRA is added with strength lora_alpha / lora_rank.
    lora_init: `gaussian` or the default of peft; either way the model starts unchanged.
    lora_path: an exported LoRA (folder or file) to start from.
    target_modules: name endings of the linear layers that get a LoRA; null takes the adapter's
        default.
    gradient_checkpointing: recompute activations in the backward pass: less memory, more time.
    adapter: the class of a flow model of your own, `my_module.MyModel`; null takes the one for the
        checkpoint's pipeline.
    offload_idle: keep text encoders and VAE on the CPU while nobody uses them. `layers`: keep the
        weights of the transformer's blocks there, too, and copy each for every product; much
        slower, for a transformer that does not fit the card.
    prompt_cache: encode all prompts of a run before its first step and keep the result, in the
        host's `memory` or in a folder (a path with a /) that later runs use again, so that text
        encoders leave the GPU; null encodes prompts whenever they are sampled.
    decode_batch_size: samples that the VAE decodes at once, in rollouts and evaluations: it needs
        more memory for a sample than anything else; null: all of a chunk.
    chat_template_kwargs: options of a language model's chat template, such as enable_thinking; a
        template of your own is its chat_template.
    """

    kind: str = "diffusion"
    path: str = ""
    dtype: str = "fp32"
    quantization: str | None = None
    lora_rank: int = 32
    lora_alpha: int = 64
    lora_init: str = "gaussian"
    lora_path: str | None = None
    target_modules: list[str] | None = None
    gradient_checkpointing: bool = False
    offload_idle: bool | str = False
    prompt_cache: str | None = None
    decode_batch_size: int | None = None
    adapter: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def location(self) -> str:
        """Returns `path` as libraries take it: ~ is the home folder, hub ids stay as they are."""
        folder = Path(self.path).expanduser()
        return str(folder) if folder.exists() else self.path

    def hub_id(self) -> str | None:
        """Returns `path` if it is a hub id; None for a local folder, which may be gone by now."""
        is_local = Path(self.path).expanduser().exists() or self.path.startswith((".", "/", "~"))
        return None if is_local or self.path.count("/") != 1 else self.path

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work or have no effect; loads nothing."""
        check_choice("model.kind", self.kind, INDEX_FILES)
        check_choice("model.dtype", self.dtype, ("fp32", "bf16", "fp64"))
        check_choice("model.quantization", self.quantization, (*GROUPS, None))
        check_choice("model.lora_init", self.lora_init, ("gaussian", "default"))
        for fault in self._faults():
            raise ValueError(f"model.{fault}")
        for key in ("lora_rank", "lora_alpha", "decode_batch_size"):
            check_least(f"model.{key}", getattr(self, key), 1)

    def _faults(self) -> Iterator[str]:
        """Yields what is wrong, from the key on."""
        if self.offload_idle not in (True, False, "layers"):
            yield f"offload_idle={self.offload_idle}: give true, false or layers"
        if self.lora_rank == 0:
            yield "lora_rank=0: a LoRA is trained and never the weights themselves"
        if self.quantization is not None and self.dtype == "fp64":
            yield (
                f"quantization={self.quantization} with model.dtype=fp64, which is for exact "
                "comparisons: set model.dtype=fp32 or bf16, or drop one of them"
            )
        for key in ("offload_idle", "prompt_cache", "decode_batch_size", "adapter"):
            value = getattr(self, key)
            if value not in (None, False) and self.kind != "diffusion":
                shown = "true" if value is True else value
                yield f"{key}={shown} has no effect with model.kind={self.kind}"
        cache = "memory" if self.prompt_cache is None else self.prompt_cache
        if cache != "memory" and ("/" not in cache or Path(cache).expanduser().is_file()):
            yield f"prompt_cache={cache}: give memory, or a folder with a /, such as ./prompts"
        for name in set(self.chat_template_kwargs) & set(_TOKENIZING):
            yield f"chat_template_kwargs.{name}: it is set here; give options of the template"
        if not self.path:
            yield "path is empty: give a local folder or a hub id"
        folder = Path(self.path).expanduser()
        if folder.suffix in WEIGHT_FILES and not folder.is_dir():
            yield (
                f"path={self.path} is a file of weights, and a folder with all parts of the "
                "pipeline is needed. To make one: from diffusers import StableDiffusion3Pipeline "
                "(or another class); StableDiffusion3Pipeline.from_single_file("
                f"{self.path!r}).save_pretrained('my_model'); then model.path=my_model"
            )
        index = INDEX_FILES[self.kind]
        if folder.exists() and not (folder / index).is_file():
            yield f"path={self.path}: no {index} there, so it is no model of model.kind={self.kind}"
        if not folder.exists() and self.hub_id() is None:
            yield f"path={self.path}: it is no folder, and has not the form of a hub id"
        if self.lora_path is not None and not Path(self.lora_path).expanduser().exists():
            yield f"lora_path={self.lora_path}: there is no such file or folder"

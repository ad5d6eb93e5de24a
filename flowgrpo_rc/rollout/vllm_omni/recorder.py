"""Runs the trainer's denoising loop in vLLM-Omni; the pipelines of all families share it.

Only the engine's process imports this module. Text encoders, transformer, guidance and parallelism
stay vLLM-Omni's. Latents, sigmas, timesteps and the maths of a step are fp32, as in
`policies.flow`; the transformer gets its own precision. The noise follows from each sample's seed,
as in the diffusers engine. The trainer decodes the latents.

Shapes: T stochastic steps of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from flowgrpo_rc.batch import SamplerSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.distributed.numerics import rounds_to_tf32
from flowgrpo_rc.models.base import Schedule
from flowgrpo_rc.policies.flow import SdeWindow, Trajectory, Velocity, sample_trajectory

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
EXTRA = "rollout"  # the key under which a request carries its Sample, and an output its record
RECORDED = ("final", "window_latents", "log_probs", "means")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The part of a request that vLLM-Omni's own parameters cannot hold; window is [T] int64."""

    spec: SamplerSpec
    schedule: Schedule
    shape: Sequence[int]
    window: Tensor
    seed: int
    latent_seed: int
    keep_means: bool


class Recorder:
    """A mix-in for a pipeline: denoises with the requests' own noise and sends back the record.

    Attributes:
      renamed: end of a module's name in diffusers -> in vLLM-Omni.
      timestep_unit: what timesteps are divided by for the transformer.
      lora: the tensors to bind and their rank; set before vLLM-Omni asks for the adapter.
    """

    supports_request_batch = True
    renamed: ClassVar[Mapping[str, str]] = {}
    timestep_unit: ClassVar[float] = 1.0
    od_config: Any
    device: torch.device
    lora: tuple[Mapping[str, Tensor], int] | None = None

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Runs the pipeline on a batch of requests; each output carries its sample's record."""
        # vLLM-Omni warms up at 512 x 512 pixels, for which a small model has no positions.
        if req.is_dummy_run():
            return [DiffusionOutput(output=torch.zeros(1)) for _ in req.requests]
        self._samples = [params.extra_args[EXTRA] for params in req.sampling_params_list]
        outputs = self._sample(req)
        record = self._record
        spec = asdict(self._used(req.sampling_params_list[0]))
        shared = {
            "sigmas": record.schedule.sigmas.cpu(),
            "timesteps": record.schedule.timesteps.cpu(),
            "spec": spec,
        }
        for row, output in enumerate(outputs):
            recorded = {name: getattr(record, name) for name in RECORDED}
            sample_record = {
                name: rows[row].cpu() for name, rows in recorded.items() if rows is not None
            }
            output.output = {
                "payload": {"image": sample_record["final"]},
                "metadata": {EXTRA: shared | sample_record},
            }
        return outputs

    def _sample(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Has the pipeline call `_denoise`, and returns an output for each request."""
        outputs: list[DiffusionOutput] = super().forward(req)  # type: ignore[misc]
        return outputs

    def predict_noise(self, *args: Any, **named: Any) -> Tensor:
        """Returns the prediction in fp32, before guidance enlarges what bf16 rounds away."""
        return super().predict_noise(*args, **named).float()  # type: ignore[misc]

    def _guided(
        self,
        state: Mapping[str, Any],
        texts: Sequence[Mapping[str, Any]],
        scale: float,
        normalize: bool,
    ) -> Tensor:
        """Returns the velocity; `texts` are of the prompt and, with guidance, of the negative."""
        inputs = [{**state, **text, "return_dict": False} for text in texts]
        is_guided = len(inputs) == 2
        velocity: Tensor = self.predict_noise_maybe_with_cfg(  # type: ignore[attr-defined]
            is_guided, scale, inputs[0], inputs[1] if is_guided else None, normalize
        )
        return velocity

    def _walk(
        self,
        is_guided: bool,
        scale: float,
        normalize: bool,
        texts: Mapping[str, tuple[Any, Any]],
        shared: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Does what a family's `diffuse` has to do; `texts` are of the prompt and the negative."""
        prompts = [
            {name: pair[place] for name, pair in texts.items()}
            for place in range(2 if is_guided else 1)
        ]

        def velocity(x: Tensor, at: Tensor) -> Tensor:
            state = {
                "hidden_states": x.to(self.od_config.dtype),
                "timestep": at / self.timestep_unit,
                **(shared or {}),
            }
            return self._guided(state, prompts, scale, normalize)

        return self._denoise(velocity)

    def _denoise(self, velocity: Velocity) -> Tensor:
        """Walks the schedule, keeps the record, and returns the final latents to the pipeline."""
        samples = self._samples
        first = self._samples[0]
        seeds = [sample.seed for sample in samples]
        schedule = Schedule(*(tensor.to(self.device) for tensor in first.schedule))
        self._record: Trajectory = sample_trajectory(
            velocity,
            schedule,
            normal(first.shape, [sample.latent_seed for sample in samples], "latents").to(
                self.device
            ),
            first.spec,
            SdeWindow(
                torch.stack([sample.window for sample in samples]).to(self.device),
                partial(normal, first.shape, seeds, "step"),
                first.keep_means,
            ),
        )
        return self._record.final

    def _used(self, params: OmniDiffusionSamplingParams) -> SamplerSpec:
        """Returns the settings that vLLM-Omni really used, and the trainer's stochastic step."""
        return replace(
            self._samples[0].spec,
            height=params.height,
            width=params.width,
            num_inference_steps=params.num_inference_steps,
            num_frames=params.num_frames if self._samples[0].spec.num_frames else None,
            guidance_scale=params.guidance_scale,
            max_sequence_length=params.max_sequence_length,
            dtype=DTYPES[self.od_config.dtype],
            tf32=rounds_to_tf32(DTYPES[self.od_config.dtype]),
        )

    def _load_diffusion_lora_adapter(
        self, *, lora_request: Any, lora_path: str, dtype: torch.dtype
    ) -> Any:
        """Hands vLLM-Omni, which calls this hook, its adapter in the tensors' own precision."""
        assert self.lora is not None, "tensors are handed over before they are bound"
        tensors, rank = self.lora
        named = {}
        for name, tensor in tensors.items():
            for theirs, ours in self.renamed.items():
                name = name.replace(f"{theirs}.lora_", f"{ours}.lora_")
            named[f"base_model.model.{name}"] = tensor
        modules = sorted(
            {name.removeprefix("base_model.model.").split(".lora_")[0] for name in named}
        )
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=modules)
        model = LoRAModel.from_lora_tensors(
            lora_request.lora_int_id, named, helper, device="cpu", dtype=dtype
        )
        return model, helper


class TrueCfgRecorder(Recorder):
    """A recorder for a family whose scale of guidance is `true_cfg_scale`."""

    timestep_unit = 1000.0
    transformer: Any

    def _walk(self, is_guided: bool, scale: float, *given: Any) -> Tensor:
        self.transformer.do_true_cfg = is_guided
        self._guidance = scale if is_guided else 1.0  # the scale that is really used
        return super()._walk(is_guided, scale, *given)

    def _used(self, params: OmniDiffusionSamplingParams) -> SamplerSpec:
        used = super()._used(params)
        requested = max(used.true_cfg_scale or 1.0, 1.0)
        return used if self._guidance == requested else replace(used, true_cfg_scale=self._guidance)

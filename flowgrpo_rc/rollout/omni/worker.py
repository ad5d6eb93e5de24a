"""What the engine's worker does for the trainer. Imported by the engine's process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest


class RolloutWorker(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker, whose methods the engine calls by name."""

    model_runner: Any
    lora_manager: Any
    od_config: Any

    def rollout_encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        with torch.inference_mode():
            return self.model_runner.pipeline.encode(texts, max_sequence_length)

    def rollout_bind_lora(self, request: LoRARequest, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Replace the adapter; returns what the layers hold now. ValueError if some tensor has no layer."""
        for adapter in self.lora_manager.list_adapters():
            self.lora_manager.remove_adapter(adapter)
        self.model_runner.pipeline.lora = (tensors, rank)
        self.lora_manager.set_active_adapter(request)
        return self.rollout_bound_lora()

    def rollout_bound_lora(self) -> dict[str, Tensor]:
        """The adapter's tensors as the layers hold them, under the trainer's names; nothing where it is off.

        With tensor parallelism a layer holds a part, and the whole tensors are read from the manager instead, which
        binds all or raises.
        """
        manager, (_, rank) = self.lora_manager, self.model_runner.pipeline.lora
        if self.od_config.parallel_config.tensor_parallel_size > 1:
            adapters = [manager._registered_adapters[key] for key in [manager._active_adapter_id] if key is not None]
            held = {name: weights for adapter in adapters for name, weights in adapter.loras.items()}
            return {f"{n}.lora_{k}.weight": t for n, w in held.items() for k, t in (("A", w.lora_a), ("B", w.lora_b))}
        bound = {}
        for path, layer in manager._lora_modules.items():
            module, _, leaf = path.partition(".")[2].rpartition(".")  # without `transformer.`
            slices = manager._get_packed_sublayer_suffixes(leaf, layer.n_slices) if layer.n_slices > 1 else [leaf]
            for index, name in enumerate(slices):
                if layer._diffusion_lora_active_slices[index]:
                    bound[f"{module}.{name}.lora_A.weight"] = layer.lora_a_stacked[index][0, 0, :rank]
                    bound[f"{module}.{name}.lora_B.weight"] = layer.lora_b_stacked[index][0, 0, :, :rank]
        return bound

"""The trainer's methods of the engine's worker; only the engine's process imports this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.lora.request import LoRARequest

from flowgrpo_rc.rollout.options.quantized import count_quantized

Pair = tuple[Tensor, Tensor]


class RolloutWorker(CustomPipelineWorkerExtension):
    """A mix-in for vLLM-Omni's worker; the engine calls its methods by name."""

    model_runner: Any
    lora_manager: Any
    od_config: Any

    def rollout_quantized(self) -> tuple[int, int]:
        """Returns the number of the transformer's quantized layers, and that of all."""
        return count_quantized(self.model_runner.pipeline.transformer)

    def rollout_encode(self, texts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Returns the conditioning of the texts."""
        with torch.inference_mode():
            return self.model_runner.pipeline.encode(texts, max_sequence_length)

    def rollout_bind_lora(
        self, request: LoRARequest, tensors: Mapping[str, Tensor], rank: int
    ) -> dict[str, Tensor]:
        """Replaces the adapter and returns what layers hold. ValueError if a tensor has none."""
        for adapter in self.lora_manager.list_adapters():
            self.lora_manager.remove_adapter(adapter)
        self.model_runner.pipeline.lora = (tensors, rank)
        self.lora_manager.set_active_adapter(request)
        return self.rollout_bound_lora()

    def rollout_bound_lora(self) -> dict[str, Tensor]:
        """Returns the adapter's tensors as the layers hold them; none if the adapter is off."""
        manager = self.lora_manager
        pipeline = self.model_runner.pipeline
        _, rank = pipeline.lora
        whole = self.od_config.parallel_config.tensor_parallel_size == 1
        # Of several GPUs a layer holds a slice. The manager binds all tensors or raises.
        bound = _in_layers(manager, rank) if whole else _in_manager(manager)
        named: dict[str, Tensor] = {}
        for module, pair in bound:
            for theirs, ours in pipeline.renamed.items():
                module = module.removesuffix(ours) + theirs if module.endswith(ours) else module
            named |= {
                f"{module}.lora_{letter}.weight": tensor
                for letter, tensor in zip("AB", pair, strict=True)
            }
        return named


def _in_layers(manager: Any, rank: int) -> Iterator[tuple[str, Pair]]:
    """Yields module name and LoRA pair of every layer whose adapter is on."""
    for path, layer in manager._lora_modules.items():
        # The path begins with `transformer.`; a packed layer holds several of diffusers' layers.
        parent, _, leaf = path.partition(".")[2].rpartition(".")
        pairs = [
            (a[0, 0, :rank], b[0, 0, :, :rank])
            for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        ]
        active = layer._diffusion_lora_active_slices
        names = [leaf]
        if layer.n_slices > 1:
            names = manager._get_packed_sublayer_suffixes(leaf, layer.n_slices)
        if names is None:
            # One layer of diffusers, cut in slices that share A. Others would be no whole layer,
            # and so have no name.
            first = pairs[0][0]
            if all(active) and all(torch.equal(a, first) for a, _ in pairs):
                yield f"{parent}.{leaf}", (first, torch.cat([b for _, b in pairs]))
            continue
        for name, pair, is_active in zip(names, pairs, active, strict=True):
            if is_active:
                yield f"{parent}.{name}", pair


def _in_manager(manager: Any) -> Iterator[tuple[str, Pair]]:
    """Yields module name and LoRA pair of every layer of the manager's active adapter."""
    adapter = manager._registered_adapters.get(manager._active_adapter_id)
    for name, weights in () if adapter is None else adapter.loras.items():
        yield name, (weights.lora_a, weights.lora_b)

"""FSDP2 for a network whose base is frozen: the base is sharded, the LoRA stays whole on every
process.

Frozen weights have no gradients, so nothing is ever reduced through the shards:
`Processes.sum_gradients` serves both strategies, and optimizer, average, checkpoints and export do
not know of the sharding. No arithmetic changes
either: a forward gathers the very bits that were split.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

STRATEGIES = ("auto", "ddp", "fsdp2")
# What accelerate's launcher passes on: the only value that has no effect beyond ours, and the key
# to change.
_NOT_OURS = {
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("false", "fsdp_cpu_ram_efficient_loading"),
    "FSDP_OFFLOAD_PARAMS": ("false", "fsdp_offload_params"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "fsdp_activation_checkpointing"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "fsdp_reshard_after_forward"),
}


def resolve_strategy(strategy: str) -> str:
    """`ddp` or `fsdp2`: `auto` follows the configuration with which accelerate launched this
    process.

    Raises ValueError for a launcher's configuration that asks for what the trainer would not do.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not launched:
        return "ddp" if strategy == "auto" else strategy
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"fsdp_version={version} in accelerate's configuration: set it to 2")
    for variable, (allowed, key) in _NOT_OURS.items():
        given = os.environ.get(variable, allowed).lower()
        if given != allowed:
            raise ValueError(
                f"{key}={given} in accelerate's configuration: set it to {allowed} "
                "(docs/scaling_out.md)"
            )
    return "fsdp2" if strategy == "auto" else strategy


def shard_frozen_weights(network: Any, device: torch.device, timeout: timedelta) -> None:
    """Split the frozen weights of `network`, in place, over the processes of this node (all, with
    one to a node).

    Each transformer block, as the network's class names them, is gathered for its own forward and
    backward alone. Every process has to run the same forwards from then on, and copies of the
    network must have been made before.
    """
    blocks = set(network._no_split_modules)
    trained = {parameter for parameter in network.parameters() if parameter.requires_grad}
    mesh = _mesh(device, timeout)
    for module in [m for m in network.modules() if type(m).__name__ in blocks] + [network]:
        fully_shard(module, mesh=mesh, ignored_params=trained)


def _mesh(device: torch.device, timeout: timedelta) -> DeviceMesh:
    """With frozen weights the nodes owe each other nothing, so that gathering stays on the fast
    links inside one.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = per_node if per_node > 1 else dist.get_world_size()
    group, _ = dist.new_subgroups(group_size=size, timeout=timeout)
    return DeviceMesh.from_group(group, device.type)

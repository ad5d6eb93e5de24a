"""FSDP2 for a network with a frozen base: the base is sharded, every process has the whole LoRA.

Frozen weights have no gradients, so nothing is reduced through the shards. Gradients of the LoRA
are added by `Processes.sum_gradients`, with and without sharding, and optimizer, average,
checkpoints and export do not know of it. The arithmetic does not change either: a forward gathers
exactly the bits that were split.
"""

import os
import socket
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

STRATEGIES = ("auto", "ddp", "fsdp2")
# Settings that accelerate's launcher passes on and that the trainer does not follow: environment
# variable -> what it means if it is not there, the only value that is allowed, the key to change.
_LAUNCHED = {
    "FSDP_VERSION": ("1", "2", "fsdp_version"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("false", "false", "fsdp_cpu_ram_efficient_loading"),
    "FSDP_OFFLOAD_PARAMS": ("false", "false", "fsdp_offload_params"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "false", "fsdp_activation_checkpointing"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "true", "fsdp_reshard_after_forward"),
}


def resolve_strategy(strategy: str) -> str:
    """Returns `ddp` or `fsdp2`; `auto` follows accelerate. ValueError if that asks for more."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not launched:
        return "ddp" if strategy == "auto" else strategy
    for variable, (default, allowed, key) in _LAUNCHED.items():
        value = os.environ.get(variable, default).lower()
        if value != allowed:
            raise ValueError(f"{key}={value} in accelerate's configuration: set it to {allowed}")
    return "fsdp2" if strategy == "auto" else strategy


def shard_frozen_weights(
    networks: Iterable[nn.Module], device: torch.device, timeout: timedelta
) -> None:
    """Splits the frozen weights of networks over the processes of this node, in place.

    Each transformer block is gathered for its own forward and backward only. From then on every
    process has to run the same forwards. Copies of a network have to be made before.
    """
    # Those of one node have fast links. Nodes may have different numbers of processes.
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    nodes = [[r for r, name in enumerate(names) if name == node] for node in sorted(set(names))]
    if len(nodes) == len(names):
        nodes = [[*range(len(names))]]
    group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=timeout)
    mesh = DeviceMesh.from_group(group, device.type)
    for network in networks:
        blocks = set(network._no_split_modules)  # type: ignore[arg-type]
        trained = {parameter for parameter in network.parameters() if parameter.requires_grad}
        for module in [m for m in network.modules() if type(m).__name__ in blocks] + [network]:
            fully_shard(module, mesh=mesh, ignored_params=trained)

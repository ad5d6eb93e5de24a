"""The memory that a planned run holds all the time, part by part: weights, states and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.models.architecture import load_tokenizers
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.models.quantization import QuantizedLinear, precision, quantized_layers
from flowgrpo_rc.plugins import load_class
from flowgrpo_rc.rewards.base import Reward
from flowgrpo_rc.rewards.manager import PACKAGE
from flowgrpo_rc.rollout.config import ROUNDED
from flowgrpo_rc.rollout.options.merged_lora import lora_layers
from flowgrpo_rc.rollout.options.quantized import INT4_GROUP
from flowgrpo_rc.spec.checks import batch_bytes, num_trained
from flowgrpo_rc.spec.run_spec import RunSpec

Row = tuple[str, int, str]  # name, bytes, formula
# CUDA's context, the kernels of torch and the workspaces of cuBLAS. Assumed, not measured.
CONTEXT = 3 * 2**28
# Of the largest phase's activations, what torch reserves besides: gaps between tensors that come
# and go, with blocks that grow. Assumed, not measured.
GAPS = 0.05
# NCCL's own: channels on cards that NVLink joins, and the buffers of one to a neighbour in the
# ring, LL (0.5 MiB), LL128 (4.7 MiB) and NCCL_BUFFSIZE (4 MiB), and a page to send.
_CHANNELS = 32
_CONNECTION = (10 + 2) * 2**20
_OF_LORA = "4 bytes x LoRA parameters"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan."""

    spec: RunSpec  # of a flow model
    model: FlowModel  # on the meta device, with its LoRA
    network_bytes: Mapping[str, int]  # from `bytes_of_networks`, for all settings of the model
    nodes: int = 1  # machines that they are spread over, evenly

    @property
    def config(self) -> Config:
        """The settings."""
        return self.spec.config

    @property
    def processes(self) -> int:
        """The processes that share a step."""
        return self.spec.machine.num_processes

    @property
    def strategy(self) -> str:
        """How the frozen weights are spread: `ddp` or `fsdp2`."""
        return "ddp" if self.processes == 1 else resolve_strategy(self.config.trainer.strategy)

    @cached_property
    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name; empty for an architecture, which has none."""
        folder = Path(self.config.model.path)
        has_none = folder.is_dir() and not (folder / "tokenizer").is_dir()
        return {} if has_none else load_tokenizers(self.config.model)

    @property
    def vae_dtype(self) -> str:
        """The precision of the VAE, `fp32` or `bf16`."""
        return "fp32" if self.model.pipeline.vae.dtype == DTYPES["fp32"] else "bf16"

    @cached_property
    def saved(self) -> int:
        """The bytes by which `model.quantization` makes the transformers smaller."""
        layers = [m for m in self.model.network.modules() if isinstance(m, QuantizedLinear)]
        plain = sum(numbers_in(layer) * layer.scale.itemsize for layer in layers)
        return plain - sum(map(_num_bytes, layers))

    @cached_property
    def on_host(self) -> Sequence[int]:
        """The bytes of each weight of the transformers that stays on the host."""
        if self.config.model.offload_idle != "layers":
            return []
        layers = quantized_layers(self.model.network)
        return [(m.codes if isinstance(m, QuantizedLinear) else m.weight).nbytes for m in layers]

    @property
    def transformers(self) -> int:
        """The bytes of the transformers, without the LoRA."""
        return sum(self.network_bytes[name] for name in self.model.networks)

    @property
    def others(self) -> int:
        """The bytes of text encoders and VAE."""
        return sum(self.network_bytes.values()) - self.transformers

    @cached_property
    def trained(self) -> int:
        """The numbers of the LoRA."""
        return num_trained(self.model)

    @property
    def has_engine_process(self) -> bool:
        """Whether an engine of its own process samples on the trainer's card."""
        return not self.config.rollout.workers and not self.spec.engine_class.copies_network

    @property
    def sleeps(self) -> bool:
        """Whether that engine leaves the card between rollouts."""
        return self.has_engine_process and bool(self.config.rollout.engine_kwargs.get("sleep"))

    @property
    def engine(self) -> int:
        """The bytes of an engine that has a pipeline of its own."""
        vae = self.network_bytes["vae"]
        others = self.in_rollout(sum(self.network_bytes.values()) + self.saved - vae)
        itemsize = DTYPES[self.config.rollout.dtype].itemsize
        return others + vae // DTYPES[self.vae_dtype].itemsize * itemsize

    def in_rollout(self, size: int) -> int:
        """Returns the bytes in the rollout's precision of what has `size` in the trainer's."""
        itemsize = DTYPES[self.config.rollout.dtype].itemsize
        return itemsize * size // DTYPES[self.config.model.dtype].itemsize


def networks_of(model: FlowModel) -> dict[str, nn.Module]:
    """Returns the networks of a pipeline by name."""
    components = model.pipeline.components.items()
    return {name: part for name, part in components if isinstance(part, nn.Module)}


def bytes_of_networks(model: FlowModel) -> dict[str, int]:
    """Returns the bytes of each network, without the LoRA."""
    return {name: _num_bytes(network) for name, network in networks_of(model).items()}


def numbers_in(part: nn.Module) -> int:
    """Returns how many frozen parameters a network has; those of a LoRA are not frozen."""
    packed = [module for module in part.modules() if isinstance(module, QuantizedLinear)]
    codes = {p for layer in packed for p in (layer.codes, layer.scale)}
    plain = [p.numel() for p in part.parameters() if not p.requires_grad and p not in codes]
    return sum(plain) + sum(layer.in_features * layer.out_features for layer in packed)


def total(rows: Sequence[Row]) -> int:
    """Returns the bytes of all rows."""
    return sum(size for _, size, _ in rows)


def as_size(number: int) -> str:
    """Returns a number of bytes as text."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def memory(job: Job) -> list[Row]:
    """Returns what one process holds all the time."""
    config = job.config
    lora = 4 * job.trained
    moment = 1 if config.actor.optim.name == "adamw_8bit" else 4
    others = job.others
    where = f"{config.model.dtype} encoders, {job.vae_dtype} VAE"
    if config.model.prompt_cache is not None:
        others = job.network_bytes["vae"]
        where = f"{job.vae_dtype} VAE; encoders only in the first pass"
    if config.model.offload_idle:
        where = f"on the CPU; {as_size(others)} while at work"
        others = 0
    formula = f"two moments of {moment} byte(s) x LoRA parameters"
    rows = [
        _transformer(job),
        ("text encoders, VAE", others, where),
        ("LoRA", lora, _OF_LORA),
        ("gradients", lora, _OF_LORA),
        ("optimizer", 2 * moment * job.trained, formula),
    ]
    if config.actor.ema.enable:
        rows.append(("average", lora, _OF_LORA))
    if config.actor.kl_reference == "start":
        rows.append(("reference", lora, _OF_LORA))
    name, copy, formula = _copy_that_samples(job)
    if config.rollout.workers:
        worker = sum(job.network_bytes.values()) - sum(job.on_host) + lora + copy
        copy = 0
        formula = f"in workers, each with a whole model: {as_size(worker)}"
    rows.append((name, copy, formula))
    older = config.rollout.staleness
    if older:
        rows.append(("older LoRAs", lora * older, f"{_OF_LORA} x staleness {older}"))
    steps = config.rollout.window()[0]
    states = f"({steps} + 1{f' + {steps} means' if job.spec.keeps_means else ''}) states"
    elements = math.prod(job.model.latent_shape(config.rollout.spec()))
    formula = f"4 bytes x {job.spec.samples_per_step} samples x {states} x {elements} latents"
    return [
        *rows,
        *_reward_models(config),
        ("batch", batch_bytes(job.spec, job.model), formula),
    ]


def while_loading(job: Job) -> int:
    """Returns what a card needs while a run is built, beyond what it holds all the time, at most.

    fsdp2 splits the transformer, and a quantization packs the copy, when they are on the card as a
    whole.
    """
    split = job.transformers - job.transformers // job.processes if job.strategy == "fsdp2" else 0
    rollout = job.config.rollout
    if rollout.quantization is None or rollout.workers:
        return split
    linear, quantized = _quantized(job, rollout.quantization)
    return split + max(0, linear * DTYPES[rollout.dtype].itemsize - quantized)


def beside_tensors(job: Job, activations: int) -> list[Row]:
    """Returns what a card needs beside tensors, with the `activations` of the largest phase.

    NCCL takes channels x neighbours x buffers for each group of processes, computed and not
    measured. Its users report 544 MB for two and 688 MB for four A100 with NVLink
    (https://github.com/NVIDIA/nccl/issues/964), and these buffers in issue 1685; cards that PCIe
    joins have fewer channels.
    """
    contexts = 2 if job.has_engine_process else 1
    formula = f"assumed for each of {contexts} processes" if contexts > 1 else "assumed"
    rows = [("CUDA and libraries", CONTEXT * contexts, formula)]
    if job.processes > 1:
        groups = 2 if job.strategy == "fsdp2" else 1
        formula = f"{groups} group(s) x {_CHANNELS} channels x 2 neighbours x 12 MiB, by arithmetic"
        rows.append(("NCCL", 2 * groups * _CHANNELS * _CONNECTION, formula))
    formula = f"assumed: {GAPS:.0%} of that phase's activations"
    return [*rows, ("gaps between tensors", int(GAPS * activations), formula)]


def on_the_host(job: Job) -> list[Row]:
    """Returns the memory of a machine's host."""
    processes = job.processes // job.nodes
    model = job.config.model
    first_pass = model.prompt_cache is not None
    rows = []
    idle = 0
    beside = ""
    if model.offload_idle or first_pass:
        idle = (
            job.others + sum(job.on_host) - (0 if model.offload_idle else job.network_bytes["vae"])
        )
        beside = ", beside the idle models"
        formula = f"what {processes} process(es) offload: {as_size(idle)} each, pinned"
        rows.append(("idle models", processes * idle, formula))
    if job.sleeps:
        formula = f"engines of {processes} process(es): {as_size(job.engine)} each{beside}"
        rows.append(("sleeping engines", processes * (idle + job.engine), formula))
    if first_pass:
        idle += job.transformers  # on the host in the first pass over prompts
    loading = (processes - 1) * idle + sum(job.network_bytes.values()) + job.saved
    formula = f"a pipeline{beside}; several where more memory is free"
    return [*rows, ("while loading", loading, formula)]


def _num_bytes(part: nn.Module) -> int:
    """Returns the bytes of frozen parameters and buffers."""
    parameters = [p for p in part.parameters() if not p.requires_grad]
    return sum(tensor.nbytes for tensor in [*parameters, *part.buffers()])


def _transformer(job: Job) -> Row:
    shards = 1
    spread = "whole on each rank"
    if job.strategy == "fsdp2":
        # Each machine holds the weights once, or all machines together with one process each.
        per_node = job.processes // job.nodes
        shards = per_node if per_node > 1 else job.processes
        spread = f"/ {shards} (fsdp2; {as_size(job.transformers)} while loading)"
    name = "transformers" if len(job.model.networks) > 1 else "transformer"
    held = precision(job.config.model.dtype, job.config.model.quantization)
    formula = f"{held} weights and buffers, {spread}"
    away = sum(job.on_host) - max(job.on_host, default=0)
    if away:
        formula += f", but for layers on the host, save one: {as_size(away)}"
    return name, job.transformers // shards - away, formula


def _copy_that_samples(job: Job) -> Row:
    """Returns the copy in the process that samples, or an engine with a pipeline of its own."""
    rollout = job.config.rollout
    if not job.spec.engine_class.copies_network:
        where = f"{rollout.name} on the same card: a {rollout.dtype} pipeline"
        if job.sleeps:
            where += f", asleep but for the rollout: {as_size(job.engine)}"
            return "rollout engine", 0, where
        return "rollout engine", job.engine, f"{where}, always"
    is_split = job.strategy == "fsdp2" and not rollout.workers
    itemsize = DTYPES[rollout.dtype].itemsize
    # Copies in another precision share the codes of quantized weights, unless these are split.
    codes = sum(p.nbytes for p in job.model.network.parameters() if not p.is_floating_point())
    size = job.in_rollout(job.transformers - codes) + (codes if is_split else 0)
    lora = itemsize * job.trained
    if rollout.quantization is not None:
        linear, quantized = _quantized(job, rollout.quantization)
        size += quantized - linear * itemsize
        name = precision(rollout.dtype, rollout.quantization)
        formula = f"{name}: {linear:,} weights of {8 * quantized / linear:.2f} bits with scales"
    elif rollout.dtype != job.config.model.dtype:
        formula = f"{rollout.dtype} transformer and LoRA"
    else:
        lora_dtype = rollout.dtype if rollout.merge_lora == ROUNDED else "fp32"
        lora = DTYPES[lora_dtype].itemsize * job.trained
        if is_split:
            formula = f"{rollout.dtype} transformer, whole, and {lora_dtype} LoRA"
        elif rollout.merge_lora is True:
            weights = [layer.get_base_layer().weight for layer in lora_layers(job.model.network)]
            size = sum(weight.nbytes for weight in weights)
            formula = f"fp32 LoRA, and {len(weights)} {rollout.dtype} weights that it is added to"
        else:
            size = 0
            formula = f"shares the frozen weights; {lora_dtype} LoRA of its own"
    return "rollout copy", size + lora, formula


def _reward_models(config: Config) -> list[Row]:
    """Returns the weights of reward models on the trainer's card."""
    rows = []
    for name, term in config.reward.terms.items():
        options = dict(term or {})
        reward: type[Reward] = load_class(PACKAGE, options.get("_target_", name), Reward)
        if term is None or not reward.num_parameters or options.get("device") == "cpu":
            continue
        default = signature(reward).parameters.get("dtype")
        dtype = options.get("dtype", "fp32" if default is None else default.default)
        size = reward.num_parameters * DTYPES[dtype].itemsize
        formula = f"{reward.num_parameters:,} parameters in {dtype}, as published"
        rows.append((f"reward {name}", size, formula))
    return rows


def _quantized(job: Job, quantization: str) -> tuple[int, int]:
    """Returns how many weights of a copy are quantized, and their bytes as torchao packs them."""
    layers = quantized_layers(job.model.network)
    linear = sum(layer.weight.numel() for layer in layers)
    if quantization != "int4":
        return linear, linear + sum(4 * layer.out_features for layer in layers)
    # On a GPU int4 pads a weight to multiples of 8 rows and 1024 columns, and has a scale and a
    # zero point of 16 bits for each group.
    sizes = [(layer.out_features, layer.in_features) for layer in layers]
    padded = sum(8 * math.ceil(rows / 8) * 1024 * math.ceil(cols / 1024) for rows, cols in sizes)
    return linear, padded // 2 + padded // INT4_GROUP * 4

"""The memory that one process of a planned run would need, part by part."""

from __future__ import annotations

import math
from inspect import signature

from torch import nn

from flowgrpo_rc.config.check_engine import engine_of
from flowgrpo_rc.config.checks import batch_bytes, num_trained
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.plugins import load_class
from flowgrpo_rc.rewards.base import Reward
from flowgrpo_rc.rewards.manager import PACKAGE
from flowgrpo_rc.rollout.quantization import INT4_GROUP, precision, quantized_layers
from flowgrpo_rc.rollout.replica import lora_layers

Row = tuple[str, int, str]


def parts_of(model: FlowModel) -> dict[str, nn.Module]:
    """Returns the networks of a pipeline by name."""
    components = model.pipeline.components.items()
    return {name: part for name, part in components if isinstance(part, nn.Module)}


def trained_bytes(model: FlowModel) -> int:
    """Returns the bytes of the transformers, without the LoRA."""
    frozen = bytes_of_parts(model)
    return sum(frozen[name] for name in model.networks)


def numbers_in(part: nn.Module) -> int:
    """Returns how many frozen parameters a network has; those of a LoRA are not frozen."""
    return sum(p.numel() for p in part.parameters() if not p.requires_grad)


def strategy_of(config: Config, num_processes: int) -> str:
    """Returns how the frozen weights are spread: `ddp` or `fsdp2`."""
    return "ddp" if num_processes == 1 else resolve_strategy(config.trainer.strategy)


def as_size(number: int) -> str:
    """Returns a number of bytes as text."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def memory(config: Config, model: FlowModel, num_processes: int, num_nodes: int) -> list[Row]:
    """Returns the memory of one process: part, bytes, formula.

    Args:
      config: the settings.
      model: on the meta device, with its LoRA.
      num_processes: how many processes share a step.
      num_nodes: how many machines they are spread over, evenly.
    """
    frozen = bytes_of_parts(model)
    trained = num_trained(model)
    strategy = strategy_of(config, num_processes)
    rows = [
        _transformer(config, model, strategy, num_processes, num_nodes),
        _other_parts(config, sum(frozen.values()) - trained_bytes(model)),
        ("LoRA", 4 * trained, "4 bytes x LoRA parameters"),
        ("gradients", 4 * trained, "4 bytes x LoRA parameters"),
    ]
    moment = 1 if config.actor.optim.name == "adamw_8bit" else 4
    rows.append(
        ("optimizer", 2 * moment * trained, f"two moments of {moment} byte(s) x LoRA parameters")
    )
    if config.actor.ema.enable:
        rows.append(("average", 4 * trained, "4 bytes x LoRA parameters"))
    if config.rollout.workers:
        rows.append(_workers(config, model, frozen, trained))
    else:
        rows.append(_copy_that_samples(config, model, trained, strategy))
    older = config.rollout.staleness
    if older:
        rows.append(
            ("older LoRAs", 4 * trained * older, f"4 bytes x LoRA parameters x staleness {older}")
        )
    return [*rows, *_reward_models(config), *_batches(config, model, num_processes)]


def bytes_of_parts(model: FlowModel) -> dict[str, int]:
    """Returns the bytes of the networks of a pipeline, by name, without the LoRA."""
    return {name: _num_bytes(part) for name, part in parts_of(model).items()}


def has_engine_process(config: Config) -> bool:
    """Returns whether an engine of its own process samples on the trainer's card."""
    return not config.rollout.workers and not engine_of(config).copies_network


def sleeps(config: Config) -> bool:
    """Returns whether that engine leaves the card between rollouts."""
    return has_engine_process(config) and bool(config.rollout.engine_kwargs.get("sleep"))


def engine_bytes(config: Config, model: FlowModel) -> int:
    """Returns the size of an engine that has a pipeline of its own."""
    frozen = bytes_of_parts(model)
    vae = frozen["vae"]
    others = int(_scale(config) * (sum(frozen.values()) - vae))
    return others + vae // 4 * DTYPES[config.rollout.dtype].itemsize


def while_loading(config: Config, model: FlowModel, num_processes: int) -> int:
    """Returns what a card needs while a run is built, beyond what it holds all the time, at most.

    fsdp2 splits the transformer, and a quantization packs the copy, when they are on the card as a
    whole.
    """
    frozen = trained_bytes(model)
    extra = 0
    if strategy_of(config, num_processes) == "fsdp2":
        extra += frozen - frozen // num_processes
    rollout = config.rollout
    if rollout.quantization is not None and not rollout.workers:
        linear, quantized = _quantized(config, model)
        extra += max(0, linear * DTYPES[rollout.dtype].itemsize - quantized)
    return extra


def _num_bytes(part: nn.Module) -> int:
    """Returns the bytes of frozen parameters and buffers."""
    parameters = [p for p in part.parameters() if not p.requires_grad]
    return sum(tensor.numel() * tensor.itemsize for tensor in [*parameters, *part.buffers()])


def _transformer(
    config: Config, model: FlowModel, strategy: str, num_processes: int, num_nodes: int
) -> Row:
    """With fsdp2 each machine holds the weights once, or all machines together with one process
    each.
    """
    size, shards = trained_bytes(model), 1
    if strategy == "fsdp2":
        per_node = num_processes // num_nodes
        shards = per_node if per_node > 1 else num_processes
    spread = "whole on each rank"
    if shards > 1:
        spread = f"/ {shards} (fsdp2; {as_size(size)} while loading)"
    name = "transformers" if len(model.networks) > 1 else "transformer"
    return name, size // shards, f"{config.model.dtype} weights and buffers, {spread}"


def _other_parts(config: Config, size: int) -> Row:
    if config.model.offload_idle:
        return "text encoders, VAE", 0, f"on the CPU; {as_size(size)} while at work"
    return "text encoders, VAE", size, f"{config.model.dtype} encoders, fp32 VAE"


def _copy_that_samples(config: Config, model: FlowModel, trained: int, strategy: str) -> Row:
    """Returns the copy in the trainer's process, or an engine with a pipeline of its own."""
    if not engine_of(config).copies_network:
        return _engine(config, model)
    rollout = config.rollout.dtype
    size = int(_scale(config) * trained_bytes(model))
    lora = DTYPES[rollout].itemsize * trained
    if config.rollout.quantization is not None:
        linear, quantized = _quantized(config, model)
        size += quantized - linear * DTYPES[rollout].itemsize
        name = precision(rollout, config.rollout.quantization)
        formula = f"{name}: {linear:,} weights of {8 * quantized / linear:.2f} bits with scales"
        return "rollout copy", size + lora, formula
    if rollout != config.model.dtype:
        return "rollout copy", size + lora, f"{rollout} transformer and LoRA"
    if strategy == "fsdp2":
        formula = f"{rollout} transformer, whole, and fp32 LoRA"
        return "rollout copy", trained_bytes(model) + 4 * trained, formula
    if config.rollout.merge_lora:
        weights = [layer.get_base_layer().weight for layer in lora_layers(model.network)]
        own = sum(weight.numel() * weight.itemsize for weight in weights)
        formula = f"fp32 LoRA, and {len(weights)} {rollout} weights that it is added to"
        return "rollout copy", 4 * trained + own, formula
    return "rollout copy", 4 * trained, "shares the frozen weights; fp32 LoRA of its own"


def _workers(config: Config, model: FlowModel, frozen: dict[str, int], trained: int) -> Row:
    """Returns nothing for this process; a worker has a whole model, its LoRA and a copy of both."""
    name, copy, _ = _copy_that_samples(config, model, trained, "ddp")
    size = sum(frozen.values()) + 4 * trained + copy
    return name, 0, f"in workers, each with a whole model: {as_size(size)}"


def _engine(config: Config, model: FlowModel) -> Row:
    size = engine_bytes(config, model)
    formula = f"{config.rollout.name} on the same card: a {config.rollout.dtype} pipeline"
    if sleeps(config):
        return "rollout engine", 0, f"{formula}, asleep but for the rollout: {as_size(size)}"
    return "rollout engine", size, f"{formula}, always"


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


def _scale(config: Config) -> float:
    """Returns the bytes of a rollout weight over the bytes of a trained model's weight."""
    return DTYPES[config.rollout.dtype].itemsize / DTYPES[config.model.dtype].itemsize


def _quantized(config: Config, model: FlowModel) -> tuple[int, int]:
    """Returns how many weights of a copy are quantized, and their bytes then."""
    quantization = config.rollout.quantization
    if quantization is None:
        return 0, 0
    layers = quantized_layers(model.network)
    linear = sum(layer.weight.numel() for layer in layers)
    return linear, sum(_quantized_bytes(layer, quantization) for layer in layers)


def _quantized_bytes(layer: nn.Linear, quantization: str) -> int:
    """Returns the size of a weight as torchao packs it on a GPU.

    int4 pads a weight to multiples of 8 rows and 1024 columns, and has a scale and a zero point of
    16 bits for each group.
    """
    rows, columns = layer.out_features, layer.in_features
    if quantization != "int4":
        return rows * columns + 4 * rows
    padded = math.ceil(rows / 8) * 8 * math.ceil(columns / 1024) * 1024
    return padded // 2 + padded // INT4_GROUP * 4


def _batches(config: Config, model: FlowModel, num_processes: int) -> list[Row]:
    steps = config.rollout.window()[0]
    elements = math.prod(model.latent_shape(config.rollout.spec()))
    states = f"{steps} + 1"
    if config.keep_means():
        states += f" + {steps} means"
    samples = config.samples_per_step(num_processes)
    formula = f"4 bytes x {samples} samples x ({states}) states x {elements} latents"
    size = batch_bytes(config, model, num_processes)
    return [("batch", size, formula)]

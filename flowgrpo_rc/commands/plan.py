"""What a run would do and need, computed from its configuration: parameters, memory, images,
forwards and updates.

Models are built on the meta device, so that nothing is allocated, downloaded but for small files,
or run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowgrpo_rc.build import ROLLOUT_PACKAGE, check_model
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.models.architecture import META, build_architecture
from flowgrpo_rc.models.base import DTYPES, FlowModel
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.plugins import load_class
from flowgrpo_rc.rollout.engine import RolloutEngine
from flowgrpo_rc.rollout.quantization import linear_layers, precision, repeated_blocks

QUANTIZED_BITS = {"int8": 8, "int4": 4, "fp8": 8, "int8_dynamic": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """parameters: (part, number, remark); memory: (part, bytes, formula) of one rank; counts:
    (name, value, formula).

    A forward is one sample through the transformer.
    """

    title: str
    parameters: Sequence[tuple[str, int, str]]
    memory: Sequence[tuple[str, int, str]]
    counts: Sequence[tuple[str, str, str]]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.memory)

    def __str__(self) -> str:
        parameters = [(name, f"{count:,}", remark) for name, count, remark in self.parameters]
        memory = [(name, _size(size), formula) for name, size, formula in self.memory]
        memory.append(
            ("sum", _size(self.total_bytes), "activations and library overhead come on top")
        )
        sections = (("parameters", parameters), ("memory of a rank", memory), ("plan", self.counts))
        blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections]
        return "\n\n".join([self.title, *blocks])


def make_plan(
    config: Config, num_processes: int, architectures: Path, *, num_nodes: int = 1
) -> Plan:
    """The plan of a validated configuration for so many processes, evenly on so many machines.

    `architectures` holds pipeline folders without weights, for hub ids. Raises ValueError for a
    model that is neither there nor in a folder nor on the hub, and for settings that do not fit it.
    """
    if config.model.kind != "diffusion":
        raise ValueError(
            f"plan knows flow models, model.kind=diffusion; model.kind={config.model.kind}"
        )
    path = _location(config.model.path, architectures)
    config = replace(config, model=replace(config.model, path=path, lora_path=None))
    check_model(config)
    model = build_architecture(config.model)
    for spec, key in (
        (config.rollout.spec(), "pipeline"),
        (config.rollout.held_out_spec(), "val_kwargs"),
    ):
        model.check(spec, f"rollout.{key}")
    parts = {
        name: part
        for name, part in model.pipeline.components.items()
        if isinstance(part, nn.Module)
    }
    parameters = [
        (name, _count(part.parameters()), type(part).__name__) for name, part in parts.items()
    ]
    frozen = {name: _bytes(part) for name, part in parts.items()}
    share = 100 / _count(model.transformer.parameters())
    with META:
        trained = _count(
            lora_parameters(add_lora(model, config.model, config.trainer.seed)).values()
        )
    parameters.append(("LoRA", trained, f"trained: {share * trained:.2f}% of the transformer"))
    strategy = "ddp" if num_processes == 1 else resolve_strategy(config.trainer.strategy)
    where = f"{num_processes} process" + (f"es, {strategy}" if num_processes > 1 else "")
    return Plan(
        title=f"{config.trainer.experiment_name}: {model.pipeline_class} on {where}",
        parameters=parameters,
        memory=_memory(config, model, frozen, trained, num_processes, strategy, num_nodes),
        counts=_counts(config, model, num_processes),
    )


def _memory(
    config: Config,
    model: FlowModel,
    frozen: dict[str, int],
    trained: int,
    num_processes: int,
    strategy: str,
    num_nodes: int,
) -> list[tuple[str, int, str]]:
    dtype = config.model.dtype
    transformer = frozen["transformer"]
    per_node = num_processes // num_nodes
    shards = (per_node if per_node > 1 else num_processes) if strategy == "fsdp2" else 1
    spread = (
        f"/ {shards} (fsdp2; {_size(transformer)} while loading)"
        if shards > 1
        else "whole on each rank"
    )
    rows = [("transformer", transformer // shards, f"{dtype} weights and buffers, {spread}")]
    others = sum(frozen.values()) - transformer
    if config.model.offload_idle:
        rows.append(("text encoders, VAE", 0, f"on the CPU; {_size(others)} while at work"))
    else:
        rows.append(("text encoders, VAE", others, f"{dtype} encoders, fp32 VAE"))
    rows.append(("LoRA", 4 * trained, "4 bytes x LoRA parameters"))
    rows.append(("gradients", 4 * trained, "4 bytes x LoRA parameters"))
    moment = 1 if config.actor.optim.name == "adamw_8bit" else 4
    rows.append(
        ("optimizer", 2 * moment * trained, f"two moments of {moment} byte(s) x LoRA parameters")
    )
    if config.actor.ema.enable:
        rows.append(("average", 4 * trained, "4 bytes x LoRA parameters"))
    rows.append(_replica(config, model, frozen, trained, strategy))
    older = config.rollout.staleness
    if older:
        rows.append(
            ("older LoRAs", 4 * trained * older, f"4 bytes x LoRA parameters x staleness {older}")
        )
    samples = config.samples_per_step(num_processes)
    steps, elements = (
        config.rollout.window()[0],
        math.prod(model.latent_shape(config.rollout.spec())),
    )
    states = 4 * samples * (steps + 1) * elements
    rows.append(
        (
            "batch",
            states,
            f"4 bytes x {samples} samples x ({steps} + 1) states x {elements} latents",
        )
    )
    return rows


def _replica(
    config: Config, model: FlowModel, frozen: dict[str, int], trained: int, strategy: str
) -> tuple[str, int, str]:
    """The copy that samples: in the trainer's process, or an engine of its own with all parts of
    the pipeline.
    """
    rollout, training = config.rollout.dtype, config.model.dtype
    scale = DTYPES[rollout].itemsize / DTYPES[training].itemsize
    engine: type[RolloutEngine[Any]] = load_class(
        ROLLOUT_PACKAGE, config.rollout.name, RolloutEngine
    )
    if not engine.copies_network:
        size = (
            int(scale * (sum(frozen.values()) - frozen["vae"]))
            + frozen["vae"] // 4 * DTYPES[rollout].itemsize
        )
        when = "while sampling" if config.rollout.engine_kwargs.get("sleep") else "always"
        return (
            "rollout engine",
            size,
            f"{config.rollout.name} on the same card: a {rollout} pipeline, {when}",
        )
    if config.rollout.quantization is not None:
        bits = QUANTIZED_BITS[config.rollout.quantization]
        linear = _count(
            layer.weight
            for block in repeated_blocks(model.transformer)
            for layer in linear_layers(block)
        )
        size = (
            int(scale * frozen["transformer"])
            - linear * DTYPES[rollout].itemsize
            + linear * bits // 8
        )
        lora = DTYPES[rollout].itemsize * trained
        name = precision(rollout, config.rollout.quantization)
        return (
            "rollout copy",
            size + lora,
            f"{name}: {linear:,} weights of {bits} bits and their scales",
        )
    if rollout != training:
        lora = DTYPES[rollout].itemsize * trained
        return (
            "rollout copy",
            int(scale * frozen["transformer"]) + lora,
            f"{rollout} transformer and LoRA",
        )
    if strategy == "fsdp2":
        return (
            "rollout copy",
            frozen["transformer"] + 4 * trained,
            f"{rollout} transformer, whole, and fp32 LoRA",
        )
    return "rollout copy", 4 * trained, "shares the frozen weights; fp32 LoRA of its own"


def _counts(config: Config, model: FlowModel, num_processes: int) -> list[tuple[str, str, str]]:
    data, actor, rollout = config.data, config.actor, config.rollout
    prompts, images = data.train_batch_size, data.train_batch_size * rollout.n
    per_rank, mini = (
        config.samples_per_step(num_processes),
        config.samples_per_mini_batch(num_processes),
    )
    size, first, last = rollout.window()
    guided = model.cfg_scale(rollout.spec()) > 1
    cfg = 2 if guided else 1
    told = " x 2 (guidance)" if guided else ""
    denoising = rollout.pipeline.num_inference_steps
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    steps = config.trainer.total_training_steps
    window = f"{size} of the steps {first} to {last - 1}, of {denoising}"
    rows = [
        (
            f"{model.makes}s per step",
            f"{images:,}",
            f"{prompts} prompts x {rollout.n}; {per_rank} on a rank",
        ),
        (
            "groups per step",
            f"{prompts:,}",
            f"{rollout.n} samples each; {prompts // num_processes} on a rank",
        ),
        ("stochastic steps", str(size), window),
        (
            "latents of a sample",
            f"{math.prod(model.latent_shape(rollout.spec())):,}",
            _shape(model, config),
        ),
        (
            "forwards, sampling",
            f"{per_rank * denoising * cfg:,}",
            f"{per_rank} samples x {denoising} steps{told}",
        ),
    ]
    trained = per_rank * size * cfg
    each = f"{per_rank} samples x {size} stochastic steps{told}"
    if not config.algorithm.rollout_correction.bypass_mode:
        why = config.why_recompute()
        recomputed = trained if why else trained * (prompts - actor.ppo_mini_batch_size) // prompts
        which = (
            f"of every mini-batch: {why}"
            if why
            else "of all mini-batches but the first, whose own forwards serve"
        )
        rows.append(("forwards, old policy", f"{recomputed:,}", f"no gradient; {which}"))
    epochs = f" x {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else ""
    if actor.use_kl_loss:
        rows.append(
            (
                "forwards, reference",
                f"{trained * actor.ppo_epochs:,}",
                f"{each}{epochs}, no gradient (KL)",
            )
        )
    rows.append(("forwards with backward", f"{trained * actor.ppo_epochs:,}", f"{each}{epochs}"))
    micro = actor.ppo_micro_batch_size_per_gpu
    rows += [
        (
            "mini-batches per step",
            str(updates),
            f"{actor.ppo_mini_batch_size} prompts each, {mini} samples on a rank",
        ),
        (
            "micro-batches each",
            f"{mini // micro * size}",
            f"{mini} / {micro} samples x {size} stochastic steps",
        ),
        ("steps", f"{steps:,}", f"{steps * images:,} {model.makes}s in all"),
        ("updates", f"{steps * updates:,}", f"{updates} per step"),
    ]
    return rows


def _location(path: str, architectures: Path) -> str:
    """A local folder, the folder without weights for a hub id, or the hub id itself."""
    folder = Path(path).expanduser()
    if folder.exists():
        return str(folder)
    for index in sorted(architectures.glob("*/model_index.json")):
        if json.loads(index.read_text())["_name_or_path"] == path:
            return str(index.parent)
    return path


def _shape(model: FlowModel, config: Config) -> str:
    pipeline = config.rollout.pipeline
    frames = "" if pipeline.num_frames is None else f", {pipeline.num_frames} frames"
    shape = " x ".join(map(str, model.latent_shape(config.rollout.spec())))
    return f"{shape} for {pipeline.height} x {pipeline.width} pixels{frames}"


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(part: nn.Module) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in [*part.parameters(), *part.buffers()])


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def _columns(rows: Sequence[tuple[str, str, str]]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows)

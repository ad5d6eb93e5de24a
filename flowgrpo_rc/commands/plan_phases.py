"""Computes what a planned run needs besides weights and states: on the card, phase by phase, and on
the host.
"""

from __future__ import annotations

from flowgrpo_rc.commands.plan_activations import Activations, rows_at_once, rows_of
from flowgrpo_rc.commands.plan_memory import (
    Row,
    as_size,
    bytes_of_parts,
    engine_bytes,
    has_engine_process,
    sleeps,
    strategy_of,
    trained_bytes,
    while_loading,
)
from flowgrpo_rc.config.checks import num_trained
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.networks import transformers

# CUDA's context, the kernels of torch and the workspaces of cuBLAS. Assumed, not measured.
CONTEXT = 3 * 2**28


def phases(config: Config, model: FlowModel, num_processes: int, found: Activations) -> list[Row]:
    """Returns what each phase of a step needs besides; the phases follow each other.

    Args:
      config: the settings.
      model: on the meta device, with its LoRA.
      num_processes: how many processes share a step.
      found: the activations of its phases.
    """
    gathered = _gathered(config, model, num_processes)
    around = f", {as_size(gathered)} of gathered weights" if gathered else ""
    update = found.update + gathered
    formula = f"activations of {rows_at_once(config)} rows{around}"
    if num_processes > 1:
        update = max(update, 4 * num_trained(model))
        formula += ", or a flat copy of the gradients"
    steps = [("update", update, formula)]
    rows = rows_of(config)
    parts = bytes_of_parts(model)
    offload = config.model.offload_idle
    vae, in_vae = (parts["vae"], "the fp32 VAE, and the VAE") if offload else (0, "the fp32 VAE")
    if not config.rollout.workers:
        sampling, formula = found.rollout, f"activations of {rows.rollout} samples"
        if sleeps(config):
            sampling += engine_bytes(config, model)
            formula += ", and the engine, which sleeps otherwise"
        steps.append(("rollout", sampling, formula))
        formula = f"activations of {rows.decoding} samples in {in_vae}"
        steps.append(("decoding", found.decoding + vae, formula))
    if offload:
        encoders = sum(parts.values()) - trained_bytes(model) - parts["vae"]
        steps.append(("encoding", encoders, "text encoders; their activations are small"))
    trainer = config.trainer
    if trainer.val_before_train or trainer.test_freq >= 0:
        evaluation = max(found.evaluation + gathered, found.shown + vae)
        formula = f"activations of {rows.evaluation} samples, or of {rows.shown} in {in_vae}"
        steps.append(("evaluation", evaluation, formula))
    loading = while_loading(config, model, num_processes)
    if loading:
        formula = "at most: weights that are split or quantized only when they are on the card"
        steps.append(("loading", loading, formula))
    return steps


def _gathered(config: Config, model: FlowModel, num_processes: int) -> int:
    """Returns the bytes of split weights that are whole on a card during a forward or backward.

    These are a block that computes, one that is fetched meanwhile, and what is in no block.
    """
    if strategy_of(config, num_processes) != "fsdp2":
        return 0
    blocks = [
        sum(p.numel() * p.itemsize for p in module.parameters() if not p.requires_grad)
        for network in transformers(model.network).values()
        for module in network.modules()
        if type(module).__name__ in network._no_split_modules
    ]
    return trained_bytes(model) - sum(blocks) + 2 * max(blocks)


def context(config: Config) -> Row:
    """Returns what CUDA takes for itself in the processes on a card."""
    processes = 2 if has_engine_process(config) else 1
    formula = f"assumed for each of {processes} processes" if processes > 1 else "assumed"
    return "CUDA and libraries", CONTEXT * processes, formula


def on_the_host(config: Config, model: FlowModel, num_processes: int, num_nodes: int) -> list[Row]:
    """Returns the memory of a machine's host.

    Args:
      config: the settings.
      model: on the meta device.
      num_processes: how many processes share a step.
      num_nodes: how many machines they are spread over, evenly.
    """
    parts = bytes_of_parts(model)
    whole = sum(parts.values())
    here = num_processes // num_nodes
    idle = whole - trained_bytes(model) if config.model.offload_idle else 0
    rows = []
    if idle:
        formula = f"text encoders and VAE of {here} process(es): {as_size(idle)} each, pinned"
        rows.append(("idle models", here * idle, formula))
    if sleeps(config):
        engine = engine_bytes(config, model)
        formula = f"engines of {here} process(es): {as_size(engine)} each"
        formula += ", beside the idle models" if idle else ""
        rows.append(("sleeping engines", here * (idle + engine), formula))
    loading = "a pipeline; processes load one after the other"
    if idle:
        loading = "a pipeline, beside the idle models of the processes that were first"
    return [*rows, ("while loading", (here - 1) * idle + whole, loading)]

"""Computes what a planned run needs besides weights and states: on the card, phase by phase, and on
the host.
"""

from __future__ import annotations

from flowgrpo_rc.commands.plan_activations import Activations, rows_at_once
from flowgrpo_rc.commands.plan_memory import (
    Row,
    as_size,
    bytes_of_parts,
    engine_bytes,
    has_engine_process,
    sleeps,
)
from flowgrpo_rc.config.check_engine import chunk_size
from flowgrpo_rc.config.checks import num_trained
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel

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
    update = found.update
    formula = f"activations of {rows_at_once(config)} rows"
    if num_processes > 1:
        # accelerate copies the flat gradients before it adds them up.
        update = max(update, 2 * 4 * num_trained(model))
        formula += ", or two flat copies of the gradients"
    steps = [("update", update, formula)]
    if config.rollout.workers:
        return steps
    chunk = chunk_size(config)
    sampling, formula = found.rollout, f"activations of {chunk} samples"
    if sleeps(config):
        sampling += engine_bytes(config, model)
        formula += ", and the engine, which sleeps otherwise"
    steps.append(("rollout", sampling, formula))
    decoded = min(config.model.decode_batch_size or chunk, chunk)
    decoding, formula = found.decoding, f"activations of {decoded} samples in the fp32 VAE"
    if config.model.offload_idle:
        parts = bytes_of_parts(model)
        encoders = sum(parts.values()) - parts["transformer"] - parts["vae"]
        steps.append(("encoding", encoders, "text encoders; their activations are small"))
        decoding, formula = decoding + parts["vae"], f"{formula}, and the VAE"
    return [*steps, ("decoding", decoding, formula)]


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
    rows = [("while loading", whole, "a pipeline; processes load one after the other")]
    if config.model.offload_idle:
        here = num_processes // num_nodes
        idle = whole - parts["transformer"]
        formula = f"text encoders and VAE of {here} process(es): {as_size(idle)} each, pinned"
        rows.append(("idle models", here * idle, formula))
    return rows

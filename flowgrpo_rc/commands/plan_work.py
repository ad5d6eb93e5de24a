"""Counts the floating-point operations of a planned step, on fake tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_rc.commands.plan_activations import blank_inputs, measured
from flowgrpo_rc.commands.plan_counts import forwards
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.models.base import FlowModel

ASSUMED = 400e12  # operations that a card does in a second; the best of an H100 in bf16 is 990e12


class Operations(NamedTuple):
    """Floating-point operations of one sample at one denoising step; a product and a sum are two.

    Attributes:
      forward: of a forward without gradient, one of two where there is guidance.
      update: of a forward with its backward.
    """

    forward: int
    update: int

    def of_a_step(self, config: Config, model: FlowModel, num_processes: int) -> int:
        """Returns the operations of one process in one step, of its transformer alone.

        Args:
          config: the settings.
          model: on the meta device.
          num_processes: how many processes share a step.
        """
        *others, (_, updated, _) = forwards(config, model, num_processes)
        again = self.forward if config.model.gradient_checkpointing else 0
        return sum(number for _, number, _ in others) * self.forward + updated * (
            self.update + again
        )


def work(config: Config, model: FlowModel) -> Operations:
    """Counts the matrix products of a forward, and of a forward with its backward to the LoRA.

    Args:
      config: the settings of a flow model.
      model: on the meta device, with its LoRA.
    """
    spec = config.rollout.spec()
    inputs = blank_inputs(model, 1, spec)
    each_sample = 2 if model.cfg_scale(spec) > 1 else 1

    def counted(network: Any, *, with_gradient: bool) -> int:
        # Kernels of attention that are fused hide their products from the counter.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            with torch.set_grad_enabled(with_gradient):
                velocity = model.velocity(network, *inputs, spec)
            if with_gradient:
                velocity.square().mean().backward()
        return counter.get_total_flops()

    counts = (
        measured(model.transformer, partial(counted, with_gradient=gradient))
        for gradient in (False, True)
    )
    return Operations(*(count // each_sample for count in counts))


def told(operations: int) -> tuple[str, str, str]:
    """Returns the row of a plan: name, operations, seconds.

    Args:
      operations: of one process in one step.
    """
    seconds = operations / ASSUMED
    speed = f"{ASSUMED / 1e12:.0f} TFLOP a second"
    formula = f"of the transformer in a step; {seconds:,.3g} s at {speed}, which is assumed"
    peta = operations / 1e15
    size = f"{peta:,.1f} PFLOP" if peta >= 1 else f"{1000 * peta:,.2f} TFLOP"
    return "work of a rank", size, formula

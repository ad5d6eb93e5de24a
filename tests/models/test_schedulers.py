"""Schedulers: one rule for all families, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)
from support.tiny_models import TINY

from flowgrpo_rc.models.architecture import build_architecture
from flowgrpo_rc.models.base import ModelConfig

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
NO_FLOW = [
    DPMSolverMultistepScheduler(),
    UniPCMultistepScheduler(),
    DDIMScheduler(),
    FlowMatchHeunDiscreteScheduler(shift=3.0),
    FlowMatchLCMScheduler(shift=3.0),
    DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="epsilon"),
    FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
]
# Of a class that is known, and yet no way from noise to a picture.
NO_WAY = [
    FlowMatchEulerDiscreteScheduler(invert_sigmas=True, use_dynamic_shifting=True),
    FlowMatchEulerDiscreteScheduler(shift=-2.0),
]


@pytest.mark.parametrize("family", TINY)
def test_only_schedulers_of_flows_are_taken(saved: Callable[[str], Path], family: str) -> None:
    tiny = TINY[family]
    model = build_architecture(ModelConfig(path=str(saved(family))))
    spec = tiny.spec("sde", tiny.guided, num_inference_steps=4)

    def given(scheduler: Any) -> Any:
        model.pipeline.register_modules(scheduler=scheduler)
        model.check_scheduler(spec)

    given(model.pipeline.scheduler)
    for scheduler in [*NO_FLOW, *NO_WAY]:
        name = type(scheduler).__name__
        with pytest.raises(ValueError, match=rf"^model\.path: its scheduler, {name},"):
            given(scheduler)
    solvers = [
        UniPCMultistepScheduler(**FLOW),
        DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0),
        DPMSolverMultistepScheduler(
            **FLOW, final_sigmas_type="sigma_min", algorithm_type="sde-dpmsolver++"
        ),
    ]
    for scheduler, falls in zip(solvers, (True, True, False), strict=True):
        words = (
            "fall from at most 1 to 0" if model.takes_flow_solvers else "it takes FlowMatchEuler"
        )
        if model.takes_flow_solvers and falls:
            given(scheduler)
        else:
            with pytest.raises(ValueError, match=re.escape(words)):
                given(scheduler)

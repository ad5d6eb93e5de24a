"""Runs to plan. Those with equal models share one, which takes seconds to build."""

from __future__ import annotations

from dataclasses import replace

from support.compositions import config_of, resolved

from flowgrpo_rc.config.compose import config_folder
from flowgrpo_rc.planning.plan import job_of
from flowgrpo_rc.planning.weights import Job

ARCHITECTURES = config_folder() / "architectures"
SD35 = "+experiment=sd35_medium_ocr_1xh100"
QWEN = "+experiment=qwen_image_ocr_rollout_corr_4xh800"
FILES = ("data.train_files=a.txt", "data.val_files=a.txt")
_BUILT: dict[str, Job] = {}


def job(*overrides: str, processes: int = 1, nodes: int = 1) -> Job:
    """Returns the run of some settings, whose prompts need not be there."""
    config = config_of(*overrides, *FILES, num_processes=processes)
    spec = resolved(config, processes)
    # What these say changes no model.
    plain = {"offload_idle": False, "gradient_checkpointing": False, "prompt_cache": None}
    alike = replace(config.model, decode_batch_size=None, **plain)
    if repr(alike) not in _BUILT:
        _BUILT[repr(alike)] = job_of(spec)
    first = _BUILT[repr(alike)]
    model = replace(config.model, path=first.config.model.path)
    return replace(first, spec=spec.with_sections(model=model), nodes=nodes)

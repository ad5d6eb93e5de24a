"""Checks settings of the rollout against the model: what it ignores, and what it lacks."""

from collections.abc import Collection
from dataclasses import replace

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.rollout.config import EvaluationConfig, PipelineConfig, RolloutConfig


def check_model(
    model: type[FlowModel],
    rollout: RolloutConfig,
    held_out: str = "rollout.val_kwargs",
    *,
    pinned: Collection[str] = (),
) -> None:
    """Raises ValueError if a setting has no effect on the model, or one that it needs is null.

    `held_out` names the section of evaluation; keys in `pinned` were given, whatever their value.
    """
    name = model.pipeline_class
    pipeline = rollout.pipeline
    default = PipelineConfig.guidance_scale
    _check_guidance(model, pipeline, "rollout.pipeline", default)
    evaluated = replace(rollout.val_kwargs, guidance_scale=rollout.held_out_spec().guidance_scale)
    allowed = 1.0 if "guidance_scale" in pinned else default
    _check_guidance(model, evaluated, held_out, allowed)
    only_true_cfg = model.cfg_key == "true_cfg_scale" and not model.embeds_guidance
    if only_true_cfg and pipeline.true_cfg_scale is None:
        raise ValueError(
            f"rollout.pipeline.true_cfg_scale is not set, and {name} has no other guidance: "
            "give 1 (none) or more"
        )
    if model.makes == "video" and pipeline.num_frames is None:
        raise ValueError(
            f"rollout.pipeline.num_frames is not set, and {name} makes videos: give their length"
        )
    for key, section in (("rollout.pipeline", pipeline), (held_out, rollout.val_kwargs)):
        if model.makes == "image" and section.num_frames is not None:
            setting = f"{key}.num_frames={section.num_frames}"
            raise ValueError(f"{setting} has no effect: {name} makes images")
    if pipeline.condition_images and not model.takes_images:
        raise ValueError(
            f"rollout.pipeline.condition_images={pipeline.condition_images}: {name} takes no "
            "condition images; drop it, or give model.path of a pipeline that edits"
        )
    if model.needs_images and pipeline.condition_images == 0:
        raise ValueError(
            f"rollout.pipeline.condition_images=0: {name} edits images; set it to the most images "
            "of a prompt"
        )
    least = model.min_sequence_length
    most = model.max_sequence_length
    if not least <= pipeline.max_sequence_length <= most:
        raise ValueError(
            f"rollout.pipeline.max_sequence_length={pipeline.max_sequence_length}: {name} takes "
            f"{least} to {most} tokens"
        )


def _check_guidance(
    model: type[FlowModel], section: PipelineConfig | EvaluationConfig, key: str, allowed: float
) -> None:
    """Refuses a scale below no guidance, or without effect; `guidance_scale` may be `allowed`."""
    scale = section.guidance_scale
    assert scale is not None, "null has been replaced"
    for name in ("guidance_scale", "true_cfg_scale", "guidance_scale_2"):
        value = getattr(section, name)
        least = model.unguided_scale if name == model.cfg_key else 1.0
        if value is not None and value < least:
            raise ValueError(f"{key}.{name}={value}: give {least:g} (none) or more")
    used = f"the guidance of {model.pipeline_class} is {key}.{model.cfg_key}"
    if model.cfg_key != "true_cfg_scale" and section.true_cfg_scale not in (None, 1):
        raise ValueError(f"{key}.true_cfg_scale={section.true_cfg_scale} has no effect: {used}")
    uses_guidance_scale = model.cfg_key == "guidance_scale" or model.embeds_guidance
    if not uses_guidance_scale and scale not in (1, allowed):
        raise ValueError(f"{key}.guidance_scale={scale} has no effect: {used}")
    second = section.guidance_scale_2
    if second is not None and len(model.networks) < 2:
        raise ValueError(
            f"{key}.guidance_scale_2={second} has no effect: model.path has one transformer; drop "
            "it"
        )
    if second not in (None, 1) and scale <= model.unguided_scale:
        raise ValueError(
            f"{key}.guidance_scale_2={second} has no effect with {key}.guidance_scale="
            f"{scale}, which turns all guidance off: raise that above "
            f"{model.unguided_scale:g}, or drop {key}.guidance_scale_2"
        )

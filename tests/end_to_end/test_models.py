"""Every model with an adapter trains from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.marks import slow_but
from support.runs import VIDEO, Train, read_rows
from support.subjects import Subject, make_subject
from support.tiny_models import Tiny

from flowgrpo_rc.models.base import adapters_by_pipeline

QUICK = ("flux2_klein_edits",)  # conditions on images; most runs are of SD3


@pytest.fixture(params=slow_but(QUICK, [*sorted(adapters_by_pipeline()), "flux2_klein_edits"]))
def subject(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Subject:
    """Each pipeline that has an adapter, with a random checkpoint; one more that also edits."""
    return make_subject(request.param, saved)


def edited_prompts(tiny: Tiny, folder: Path) -> list[str]:
    """Writes prompts with images; returns the settings that have them read."""
    rows = []
    for number in range(8):
        names = []
        for place, content in enumerate(tiny.images(number)):
            names.append(f"{number}_{place}.png")
            (folder / names[-1]).write_bytes(content)
        rows.append(json.dumps({"prompt": f"edit {number}", "images": names}))
    file = folder / "edits.jsonl"
    file.write_text("\n".join(rows))
    return [
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"rollout.pipeline.condition_images={max(map(len, tiny.image_sizes))}",
        f"rollout.pipeline.condition_pixels={tiny.condition_pixels}",
    ]


def test_two_steps_of_training_from_the_command_line(
    subject: Subject, train: Train, tmp_path: Path
) -> None:
    tiny = subject.tiny
    scales = [f"{key}={scale}" for key, scale in tiny.guided.items()]
    given = [f"rollout.{where}.{scale}" for where in ("pipeline", "val_kwargs") for scale in scales]
    if tiny.image_sizes:
        given += edited_prompts(tiny, tmp_path)
    frames = [] if tiny.num_frames is None else [f"rollout.pipeline.num_frames={tiny.num_frames}"]
    code = train(
        f"model.path={subject.folder}",
        "rollout.pipeline.guidance_scale=1.0",
        "rollout.val_kwargs.guidance_scale=1.0",
        *given,
        *frames,
        *VIDEO,
        "data.negative_prompt=blurry",
        "model.gradient_checkpointing=true",
        "actor.use_kl_loss=true",
    )
    assert code == 0
    rows = read_rows(tmp_path / "run")
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    assert all(row["actor/grad_norm"] > 0 for row in steps)
    assert steps[0]["rollout_corr/logprob_abs_diff_max"] == 0
    lora = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    assert max(tensor.abs().max() for name, tensor in lora.items() if "lora_B" in name) > 0
    endings = {path.suffix for path in (tmp_path / "run" / "samples").iterdir()}
    assert endings == ({".png"} if tiny.num_frames is None else {".png", ".webp"})

"""With the model, replays name faults that numbers alone cannot tell apart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.compositions import checked_config, resolved
from support.dumps import Made, make_tensors
from support.marks import slow_but

from flowgrpo_rc.assembly.source import engine_alone
from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.rollout.concat import concat
from flowgrpo_rc.rollout.engine import ImageRequest

# What the dumps are diagnosed with; a fault is another setting of their sampler.
SETTINGS = [
    "rollout.pipeline.guidance_scale=4.5",
    "rollout.pipeline.num_inference_steps=6",
    "rollout.dtype=fp32",
    "rollout.merge_lora=false",
    "trainer.device=cpu",
]
TEXTS = [" Bold  WORD", "the word Lake", "a Sign", "MIXED case"]


def write(
    folder: Path,
    *changes: str,
    shift: float | None = None,
    lower: bool = False,
    shortened: bool = False,
) -> Path:
    """Samples with the bundled model, and dumps what a foreign trainer would."""
    config = checked_config(compose_config([*SETTINGS, *changes]))
    run = resolved(config)
    config = run.config
    engine: Any = engine_alone(config, run.engine_options, Path.cwd())
    if shift is not None:
        engine._model.pipeline.scheduler.set_shift(shift)
    texts = [text.lower() for text in TEXTS] if lower else TEXTS
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(texts)]
    spec = replace(config.rollout.spec(), shared_prefix=False)
    spec = spec if shortened else replace(spec, tail_start=None)
    request = ImageRequest(
        prompts=PromptBatch(step=0, prompts=prompts, slots=range(4)),
        samples_per_prompt=1,
        spec=spec,
        seeds=range(4),
        window=torch.arange(3).expand(4, -1),
        decode=False,
    )
    batch = concat([chunk.batch for chunk in engine.generate(request)])
    names = ("all_latents", "rollout_log_probs", "step_indices", "sigmas")
    metadata = {"sde_type": spec.sde_type, "noise_level": str(spec.noise_level)}
    metadata["prompts"] = json.dumps(TEXTS)
    path = folder / "dump.safetensors"
    save_file({name: getattr(batch, name).contiguous() for name in names}, path, metadata)
    return path


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "guidance": ({}, ["rollout.pipeline.guidance_scale=6"]),
    "schedule": ({"shift": 2.0}, []),
    "prompt": ({"lower": True}, []),
    "precision": ({}, ["rollout.dtype=bf16"]),
}


@pytest.mark.parametrize("cause", slow_but(["schedule", "prompt"], FAULTS))
def test_a_planted_fault_is_named_first(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how, changes = FAULTS[cause]
    dump = write(tmp_path, *changes, **how)
    out = ["--out", str(tmp_path / "page.html")]
    assert main(["diagnose", str(dump), *out, "--model", *SETTINGS]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"Most probable cause: {cause}\n"), said


@pytest.mark.parametrize("dtype", slow_but(["fp32"], ["fp32", "bf16"]))
def test_a_clean_dump_is_not_accused(dtype: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, f"rollout.dtype={dtype}"]
    shortened = dtype == "bf16"
    if shortened:
        settings += ["rollout.pipeline.num_inference_steps=9", "rollout.algo.tail_steps=1"]
    dump = write(tmp_path, *settings, shortened=shortened)
    out = ["--out", str(tmp_path / "page.html")]
    assert main(["diagnose", str(dump), *out, "--model", *settings]) == 0


@pytest.mark.parametrize("missing", ["prompts", "sigmas"])
def test_what_is_missing_is_said(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, settings = make_tensors(Made(seed=1))
    metadata = {name: str(value) for name, value in settings.items()}
    if missing == "sigmas":
        metadata["prompts"] = json.dumps(["a word"] * len(tensors["latents"]))
        del tensors["sigmas"]
    save_file(tensors, tmp_path / "dump.safetensors", metadata=metadata)
    assert main(["diagnose", str(tmp_path), "--model", *SETTINGS]) == 2
    assert "'sigmas' and 'prompts', a text of each sample" in capsys.readouterr().err

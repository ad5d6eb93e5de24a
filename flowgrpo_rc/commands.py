"""The commands beside training: evaluate a run, export a checkpoint, check the installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yaml
from huggingface_hub import HfApi
from rich.console import Console as RichConsole
from rich.table import Table

from flowgrpo_rc.config import stored_config
from flowgrpo_rc.training.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.training.hub import check_push, push
from flowgrpo_rc.training.lora_files import export_lora
from flowgrpo_rc.training.model_card import check_card, write_model_card
from flowgrpo_rc.training.run_folder import RunFolder


def evaluate_run(run_dir: str, overrides: Sequence[str]) -> None:
    """Print the held-out scores of the base model and of the run's exported LoRA."""
    from flowgrpo_rc.assemble import check_model, make_processes, make_task
    from flowgrpo_rc.rewards.manager import RewardManager
    from flowgrpo_rc.training.console import Console
    from flowgrpo_rc.training.evaluation import Evaluator
    from flowgrpo_rc.training.lora import reference_policy

    folder = RunFolder(Path(run_dir))
    config = stored_config(folder.config, overrides)
    config.model.lora_path = str(folder.lora)
    config.trainer.logger = ["console"]
    config.validate()
    check_model(config)
    _, held_out = config.read_prompts()
    processes = make_processes(config)
    task = make_task(config, processes)
    rewards = RewardManager(config.reward)
    evaluator = Evaluator(task, held_out, config.rollout.val_kwargs, rewards)
    try:
        with reference_policy(task.model.network):
            before = evaluator.run(processes).metrics.compute(processes.sum, processes.max, processes.device)
        after = evaluator.run(processes).metrics.compute(processes.sum, processes.max, processes.device)
    finally:
        rewards.close()
    Console(total_steps=0, is_main=processes.is_main).final_table(before, after)


def export_checkpoint(
    checkpoint: str, out: str, *, raw: bool, push_to_hub: str | None = None, public: bool = False
) -> Path:
    """Write the LoRA of a checkpoint (its average unless `raw`) with a model card, for stock diffusers or peft; returns
    the file with the tensors.

    push_to_hub: also upload both to this repository, private where it is new and not `public`. Raises ValueError,
    before anything is loaded, where that cannot work.
    """
    if public and push_to_hub is None:
        raise ValueError("--public has no effect without --push-to-hub: drop it")
    api = HfApi()
    if push_to_hub is not None:
        check_push(api, push_to_hub, public=public)
    check_card(Path(out))
    path = Path(checkpoint)
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else path
    if path == run_dir:
        found = list_checkpoints(RunFolder(run_dir).checkpoints)
        if not found:
            raise ValueError(f"{checkpoint} has no checkpoints: give a run's folder or one of its checkpoints/step_N")
        path = found[-1]
    config = stored_config(RunFolder(run_dir).config)
    loaded = load_checkpoint(path)
    tensors = loaded.tensors["lora"] if raw else loaded.tensors.get("ema", loaded.tensors["lora"])
    written = export_lora(tensors, config.model, Path(out))
    source = push_to_hub or "path/to/this/folder"
    write_model_card(Path(out), run_dir, config, step=loaded.step, raw=raw, source=source)
    if push_to_hub is not None:
        print(push(api, Path(out), push_to_hub, public=public))
    return written


def serve_reward(arguments: argparse.Namespace) -> None:
    """Serve a reward until interrupted; its options are read as YAML."""
    from flowgrpo_rc.rewards.server import serve

    options = {}
    for option in arguments.options:
        key, equals, value = option.partition("=")
        if not (key and equals):
            raise ValueError(f"{option!r}: write options of the reward as key=value")
        options[key] = yaml.safe_load(value)
    serve(
        arguments.reward,
        options,
        token_env=arguments.token_env,
        host=arguments.host,
        port=arguments.port,
        certificate=arguments.certificate,
        key=arguments.key,
        max_body_mb=arguments.max_body_mb,
    )


def doctor() -> bool:
    """Print what a run needs and whether it is there; False if something is missing."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: sys.version.split()[0]),
        *((name, _version_check(name)) for name in ("torch", "diffusers", "transformers", "peft", "accelerate")),
        ("device", _device),
        ("threads", lambda: str(torch.get_num_threads())),
        ("bundled model", _bundled_model),
        ("OCR", _ocr),
        ("disk", lambda: f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here"),
    ]
    table = Table(title="flowgrpo-rc doctor", title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column)
    healthy = True
    for name, check in checks:
        try:
            table.add_row(name, "ok", check())
        except Exception as error:  # whatever is broken is the finding
            healthy = False
            table.add_row(name, "FAILED", f"{type(error).__name__}: {error}")
    RichConsole().print(table)
    return healthy


def _version_check(package: str) -> Callable[[], str]:
    return lambda: importlib.metadata.version(package)


def _device() -> str:
    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    return "cpu"


def _bundled_model() -> str:
    from flowgrpo_rc import assets

    return str(assets.path("tiny_glyph_sd3"))


def _ocr() -> str:
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    from flowgrpo_rc.batch import Prompt
    from flowgrpo_rc.rewards.ocr import OCR

    image = Image.new("RGB", (64, 32), "white")
    ImageDraw.Draw(image).text((4, 4), "AB7X", fill="black", font=ImageFont.load_default(20))
    score = OCR()(np.asarray(image)[None], [Prompt(text='"AB7X"', index=0, target="AB7X")]).values[0]
    if score < 1:
        raise RuntimeError(f"a rendered word was read with reward {score:.2f}")
    return "reads a rendered word"

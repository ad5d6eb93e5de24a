"""`flowgrpo-rc doctor`: check the installation, and with `--gpu` what a card can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.table import Table

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.commands.doctor_gpu import Finding, gpu_checks

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def main(arguments: argparse.Namespace) -> int:
    """Checks the installation, and with --gpu what a card can do."""
    if arguments.out is not None and not arguments.gpu:
        raise ValueError(f"--out {arguments.out} has no effect without --gpu")
    healthy = doctor()
    if arguments.gpu:
        healthy = _gpu(arguments.out) and healthy
    return EXIT_OK if healthy else EXIT_FAILED


def doctor() -> bool:
    """Prints what a run needs and whether it is there; returns False if something is missing."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: sys.version.split()[0]),
        *((name, partial(importlib.metadata.version, name)) for name in PACKAGES),
        ("device", _device),
        ("threads", lambda: str(torch.get_num_threads())),
        ("bundled model", lambda: str(assets.path("tiny_glyph_sd3"))),
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


def _gpu(out: str | None) -> bool:
    """Prints what a card can do, and writes it to a file; returns False if something is broken."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    console = RichConsole()
    table = Table(title=f"what runs on {device.type}", title_justify="left")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column)
    findings = {}
    for name, check in gpu_checks(device):
        with console.status(f"{name} ..."):
            try:
                one = check()
            except Exception as error:  # whatever is broken is the finding
                one = Finding("broken", f"{type(error).__name__}: {error}")
        findings[name] = one
        table.add_row(name, one.state, one.found, one.advice)
    console.print(table)
    if out is not None:
        told = {name: one._asdict() for name, one in findings.items()}
        Path(out).write_text(json.dumps(told, indent=1) + "\n")
        console.print(f"written to {out}; look at it before you attach it to an issue")
    return all(one.state != "broken" for one in findings.values())


def _device() -> str:
    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    return "cpu"


def _ocr() -> str:
    # Here and not at the top: a missing package is what this check is to find.
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    from flowgrpo_rc.rewards.ocr import OCR

    image = Image.new("RGB", (64, 32), "white")
    ImageDraw.Draw(image).text((4, 4), "AB7X", fill="black", font=ImageFont.load_default(20))
    prompt = Prompt(text='"AB7X"', index=0, target="AB7X")
    reward = OCR()
    reward.check()
    score = reward(np.asarray(image)[None], [prompt]).values[0]
    if score < 1:
        raise RuntimeError(f"a rendered word was read with reward {score:.2f}")
    return "reads a rendered word"

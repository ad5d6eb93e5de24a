"""`flowgrpo-rc doctor`: check the installation, and with `--gpu` what a card can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.table import Column, Table

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.commands.doctor_gpu import Check, Finding, gpu_checks
from flowgrpo_rc.config.machine import device_named
from flowgrpo_rc.rollout.devices import AUTO, LEAST_SAVING, product_seconds

_STATE = len("skipped")  # the longest state
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def main(arguments: argparse.Namespace) -> int:
    """Checks the installation, and with --gpu what a card can do; --out writes that to a file."""
    if arguments.out is not None and not arguments.gpu:
        raise ValueError(f"--out {arguments.out} has no effect without --gpu")
    found = report("flowgrpo-rc doctor", installation_checks())
    if arguments.gpu:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        on_device = report(f"what runs on {device.type}", gpu_checks(device))
        found |= on_device
        if arguments.out is not None:
            told = {name: one._asdict() for name, one in on_device.items()}
            Path(arguments.out).write_text(json.dumps(told, indent=1) + "\n")
            print(f"written to {arguments.out}; look at it before you attach it to an issue")
    return EXIT_FAILED if any(one.state == "broken" for one in found.values()) else EXIT_OK


def installation_checks() -> list[tuple[str, Check]]:
    """Returns the checks of what a run needs, by name."""
    told: dict[str, Callable[[], str]] = {
        "python": lambda: sys.version.split()[0],
        **{name: partial(importlib.metadata.version, name) for name in PACKAGES},
        "device": _device,
        "threads": lambda: str(torch.get_num_threads()),
        "bundled model": lambda: str(assets.path("tiny_glyph_sd3")),
        "OCR": _ocr,
        "disk": lambda: f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here",
    }
    checks = [(name, partial(_ok, check)) for name, check in told.items()]
    return [*checks, ("fp32 products", check_products)]


def check_products() -> Finding:
    """Times a product of the bundled model by torch and by oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return Finding("skipped", "this torch has no oneDNN")
    own, other = product_seconds()
    found = f"{1e3 * own:.1f} ms by torch's own library, {1e3 * other:.1f} by oneDNN"
    if other < (1 - LEAST_SAVING) * own:
        return Finding("slow", found, "set model.onednn=auto where an image model trains in fp32")
    return Finding("ok", found)


def report(title: str, checks: Sequence[tuple[str, Check]]) -> dict[str, Finding]:
    """Prints what each check has found as soon as it has."""
    console = RichConsole(highlight=False, markup=False)
    width = max((len(name) for name, _ in checks), default=0)
    console.print(f"\n{title}")
    findings = {}
    for name, check in checks:
        with console.status(f"{name} ..."):
            try:
                one = check()
            except Exception as error:  # whatever is broken is the finding
                one = Finding("broken", f"{type(error).__name__}: {error}")
        findings[name] = one
        # A table of one row wraps its cells, and the widths of all rows are the same.
        row = Table.grid(Column(width=width), Column(width=_STATE), Column(ratio=1), padding=(0, 2))
        row.add_row(name, one.state, "\n".join(filter(None, one[1:])))
        console.print(row)
    return findings


def _ok(check: Callable[[], str]) -> Finding:
    return Finding("ok", check())


def _device() -> str:
    return f"cuda: {torch.cuda.get_device_name()}" if device_named(AUTO).type == "cuda" else "cpu"


def _ocr() -> str:
    # Here and not at the top: a missing package is what this check is to find.
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    from flowgrpo_rc.rewards.ocr import OCR

    image = Image.new("RGB", (64, 32), "white")
    ImageDraw.Draw(image).text((4, 4), "AB7X", fill="black", font=ImageFont.load_default(20))
    prompt = Prompt(text='"AB7X"', index=0, target="AB7X")
    reward = OCR(engine=str(OCR().settled()["engine"]))
    reward.check()
    score = reward(np.asarray(image)[None], [prompt]).values[0]
    if score < 1:
        raise RuntimeError(f"a rendered word was read with reward {score:.2f}")
    return f"reads a rendered word with {reward.engine}"

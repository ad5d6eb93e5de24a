"""`flowgrpo-rc doctor`: check the installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console as RichConsole
from rich.table import Column, Table

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.commands import EXIT_FAILED, EXIT_OK
from flowgrpo_rc.rollout.devices import AUTO
from flowgrpo_rc.spec.machine import device_named

_STATE = len("skipped")  # the longest state
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


class Finding(NamedTuple):
    """Says in words what a check has found, and what to do about it."""

    state: str  # ok, slow, broken or skipped
    evidence: str
    advice: str = ""


Check = Callable[[], Finding]


def main(arguments: argparse.Namespace) -> int:
    """Checks the installation."""
    findings = report("flowgrpo-rc doctor", installation_checks())
    is_broken = any(finding.state == "broken" for finding in findings.values())
    return EXIT_FAILED if is_broken else EXIT_OK


def installation_checks() -> list[tuple[str, Check]]:
    """Returns the checks of what a run needs, by name."""
    checks: dict[str, Callable[[], str]] = {
        "python": lambda: sys.version.split()[0],
        **{name: partial(importlib.metadata.version, name) for name in PACKAGES},
        "device": _device,
        "threads": lambda: str(torch.get_num_threads()),
        "bundled model": lambda: str(assets.path("tiny_glyph_sd3")),
        "OCR": _ocr,
        "disk": lambda: f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here",
    }
    return [(name, partial(_ok, check)) for name, check in checks.items()]


def report(title: str, checks: Sequence[tuple[str, Check]]) -> dict[str, Finding]:
    """Prints what each check has found as soon as it has."""
    console = RichConsole(highlight=False, markup=False)
    width = max((len(name) for name, _ in checks), default=0)
    console.print(f"\n{title}")
    findings = {}
    for name, check in checks:
        with console.status(f"{name} ..."):
            try:
                finding = check()
            except Exception as error:  # whatever is broken is the finding
                finding = Finding("broken", f"{type(error).__name__}: {error}")
        findings[name] = finding
        # A table of one row wraps its cells, and the widths of all rows are the same.
        row = Table.grid(Column(width=width), Column(width=_STATE), Column(ratio=1), padding=(0, 2))
        row.add_row(name, finding.state, "\n".join(filter(None, finding[1:])))
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
    reward = OCR()
    reward.settle({})
    reward.check()
    score = reward(np.asarray(image)[None], [prompt]).values[0]
    if score < 1:
        raise RuntimeError(f"a rendered word was read with reward {score:.2f}")
    return f"reads a rendered word with {reward.engine}"

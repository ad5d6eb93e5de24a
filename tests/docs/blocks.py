"""Runs the shell and Python blocks of README.md and docs/: `make test-docs`.

The blocks of a page run in one folder, in their order. Training is capped at two small steps. A
command runs in a fork of this process, so that imports are paid for once. A block that cannot run
everywhere is marked in the page, and `test_pages.py` checks that it parses and composes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from support.documented import ROOT, Block, arguments, blocks
from support.faults import forked
from support.launching import ran

from flowgrpo_rc.cli import main

SMALL = """data.train_batch_size=2 rollout.n=4 rollout.val_kwargs.n=4 actor.ppo_mini_batch_size=2
    actor.ppo_micro_batch_size_per_gpu=4"""
CAP = {
    "train": f"trainer.total_training_steps=2 trainer.test_freq=0 trainer.save_freq=0 {SMALL}",
    "calibrate": f"--prompts=1 {SMALL}",
    "evaluate": "rollout.val_kwargs.num_inference_steps=2",
    "examples/clip_pull.py": " --iterations 2",
}
PLANNED: set[tuple[str, ...]] = set()  # plans that another page has asked for


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has who follows the pages in a checkout."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(
        ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("results")
    )
    shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


def _run(program: Callable[[], object], folder: Path) -> None:
    """Runs it in a fork in `folder`; fails with what it printed."""

    def child() -> int:
        os.chdir(folder)
        warnings.simplefilter("ignore")
        return int(program() or 0)

    ended = forked(child, timeout=900)
    assert ended.code == 0, ended.output[-3000:]


def _run_line(line: str, folder: Path) -> Path:
    """Runs a line; returns the folder that the next line runs in."""
    if line.startswith("cd "):
        return folder / shlex.split(line)[1]
    given = arguments(line)
    if given is None:
        line += CAP.get(line.split()[1], "")
        own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = ran("bash", "-ec", line, cwd=folder, env=os.environ | own)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    else:
        words = (*given, *CAP.get(given[0], "").split())
        if words not in PLANNED:
            _run(lambda: main(words), folder)
        if words[0] == "plan":
            PLANNED.add(words)
    return folder


@pytest.mark.parametrize("block", [b for b in blocks("bash") if b.why_not is None], ids=str)
def test_shell_runs(block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = workplace
    for line in block.lines():
        folder = _run_line(line, folder)


def _python_pages() -> dict[str, str]:
    pages: dict[str, str] = {}
    for block in blocks("python"):
        if block.why_not is None:
            pages[block.page.name] = pages.get(block.page.name, "") + block.text
    return pages


@pytest.mark.parametrize(("page", "code"), _python_pages().items(), ids=list(_python_pages()))
def test_python_runs(page: str, code: str, workplace: Path) -> None:
    """A page's blocks run one after the other, in the folder where its commands ran."""
    # As in an interpreter: a name that is no file, where source would be looked for.
    _run(lambda: exec(compile(code, f"<{page}>", "exec"), {"__name__": "__main__"}), workplace)

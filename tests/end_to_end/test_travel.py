"""A run goes on elsewhere: in a moved folder, under another installation, for more steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.launching import ran
from support.runs import Train, final_state, fingerprint, training_rows

import flowgrpo_rc
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import config_folder

# Runs one command line after the other; stops at the first that fails.
COMMANDS = """
import json, sys
import flowgrpo_rc
from flowgrpo_rc.cli import main
print(flowgrpo_rc.__file__)
for words in json.loads(sys.argv[1]):
    code = main(words)
    if code:
        sys.exit(code)
"""


def elsewhere(root: Path, *commands: list[str]) -> subprocess.CompletedProcess:
    """Runs commands under a copy of the package in `root`, which becomes the working folder."""
    package = Path(flowgrpo_rc.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, root / "flowgrpo_rc", ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(config_folder(), root / "configs", dirs_exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return ran(sys.executable, "-c", COMMANDS, json.dumps(commands), cwd=root, env=environment)


def trained(run: Path) -> tuple[object, ...]:
    """Returns what training came to; an extended run was evaluated once more."""
    exported = load_file(run / "lora" / "pytorch_lora_weights.safetensors")
    return final_state(run)[0], fingerprint(exported), training_rows(run)


@pytest.mark.slow
def test_a_run_goes_on_under_another_installation_as_if_it_had_stayed(
    overrides: list[str], tmp_path: Path
) -> None:
    """A run of the bundled model on its own prompts."""
    own = ("model.path=", "data.train_files=", "data.val_files=", "trainer.output_dir=")
    settings = [word for word in overrides if not word.startswith(own)]
    settings.append("actor.optim.lr_scheduler=constant")
    one, two = "trainer.total_training_steps=1", "trainer.total_training_steps=2"
    assert main(["train", *settings, two, f"trainer.output_dir={tmp_path / 'whole'}"]) == 0
    assert main(["train", *settings, one, f"trainer.output_dir={tmp_path / 'short'}"]) == 0
    other = tmp_path / "other"
    shutil.move(tmp_path / "short", other / "moved")
    done = elsewhere(
        other,
        ["train", *settings, two, "trainer.output_dir=moved"],
        ["eval", "moved"],
        ["report", "moved"],
        ["export", "moved", "--out", "exported"],
        ["compare", "moved", str(tmp_path / "whole"), "--out", "compare.html"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(other))
    assert "step 2/2" in done.stdout
    assert trained(other / "moved") == trained(tmp_path / "whole")
    assert "tiny_glyph_sd3" not in (other / "compare.html").read_text()  # no setting differs


@pytest.mark.slow
def test_an_extended_run_equals_one_of_the_whole_length(train: Train, tmp_path: Path) -> None:
    """With samples of weights from before its first end."""
    settings = ["rollout.staleness=1", "actor.optim.lr_scheduler=constant"]
    for name, lengths in (("whole", [3]), ("extended", [2, 3])):
        folder = f"trainer.output_dir={tmp_path / name}"
        for length in lengths:
            assert train(*settings, f"trainer.total_training_steps={length}", folder) == 0
    assert trained(tmp_path / "extended") == trained(tmp_path / "whole")

"""The package as it is installed and imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.documented import ROOT


def printed(program: str, wheel: Path | None = None) -> list[str]:
    """Returns the lines that a Python program prints, with the package of an unpacked wheel."""
    environment = dict(os.environ)
    if wheel is not None:
        environment["PYTHONPATH"] = str(wheel / "site")
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=wheel, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_wheel_finds_its_configuration_elsewhere(tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), *options]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import flowgrpo_rc.config.compose as c; print(c.config_folder()); "
        "print(c.compose_config([]).model.path)"
    )
    assert all(line.startswith(str(tmp_path / "site")) for line in printed(program, tmp_path))


def test_importing_rewards_loads_nothing_heavy():
    heavy = "{'rapidocr', 'onnxruntime', 'cv2', 'pyarrow', 'diffusers', 'transformers'}"
    modules = (
        "flowgrpo_rc.rewards.ocr, flowgrpo_rc.rewards.jpeg, flowgrpo_rc.rewards.manager, "
        "flowgrpo_rc.data.prompts"
    )
    use = "flowgrpo_rc.rewards.manager.build_terms(flowgrpo_rc.rewards.manager.RewardConfig())"
    code = f"import sys, {modules}; {use}; print(sorted({heavy} & set(sys.modules)))"
    assert printed(code) == ["[]"]

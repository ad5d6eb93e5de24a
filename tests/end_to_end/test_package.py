"""An installed wheel finds its configurations."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from support.documented import ROOT


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
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert all(line.startswith(str(tmp_path / "site")) for line in done.stdout.splitlines())

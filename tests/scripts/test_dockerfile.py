"""Runs the build steps of the Dockerfile without docker.

Not run are the base images, what apt-get installs, and the download of packages: those of this
environment stand in for them.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from support.documented import ROOT
from support.launching import ran


class Instruction(NamedTuple):
    """An instruction of the Dockerfile, such as RUN, and what follows it."""

    name: str
    text: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    return [Instruction(*line.split(maxsplit=1)) for line in lines]


class Build:
    """Runs instructions with the root folder of the image in `root`.

    Attributes:
      environment: the variables that a step sees.
      folder: the working folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root
        packages = sysconfig.get_paths()["purelib"]
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(root),
            "OMP_NUM_THREADS": "1",
            # Packages of this environment, and nothing from an index.
            "PYTHONPATH": packages,
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this variable the other way round
        }

    def take(self, instruction: Instruction) -> None:
        """Does what an instruction says; FROM and the entry point are not for it."""
        text = instruction.text
        match instruction.name:
            case "ENV" | "ARG":
                for pair in text.split():
                    name, _, value = pair.partition("=")
                    self.environment[name] = self._inside(value).replace(
                        "$PATH", self.environment["PATH"]
                    )
            case "WORKDIR":
                self.folder = Path(self._inside(text))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    self._copy(ROOT / source, self.folder / target)
            case "RUN" if not text.startswith("apt-get"):
                self.run(text)

    def run(self, command: str) -> str:
        """Runs a command and returns what it printed."""
        words = ("sh", "-ec", self._inside(command))
        done = ran(*words, cwd=self.folder, env=self.environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _inside(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt|src|work)\b", rf"{self._root}/\1", text)

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy(source, target)


def test_the_build_steps_run_and_the_image_s_command_works(tmp_path: Path) -> None:
    build = Build(tmp_path)
    found = instructions()
    for instruction in found:
        build.take(instruction)
    by_name = {instruction.name: instruction.text for instruction in found}
    entry = " ".join(json.loads(by_name["ENTRYPOINT"]))
    assert "train" in build.run(f"{entry} {' '.join(json.loads(by_name['CMD']))}")
    assert str(tmp_path / "opt") in build.run(f"command -v {entry}")
    assert build.run(f"{entry} train --dry-run trainer.device=cpu").startswith("ok: 8192")
    where = build.run("cd /work && python -c 'import flowgrpo_rc; print(flowgrpo_rc.__file__)'")
    assert where.startswith(str(tmp_path / "opt"))


def test_each_device_is_a_stage_and_nothing_that_is_copied_is_ignored() -> None:
    found = instructions()
    stages = [text.rpartition(" AS ")[2] for name, text in found if name == "FROM"]
    assert stages == ["cpu", "cuda", "${DEVICE}"]
    assert found[0] == Instruction("ARG", "DEVICE=cpu")
    sources = [word for name, text in found if name == "COPY" for word in text.split()[:-1]]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    assert sorted(sources) == sorted(kept)
    assert all((ROOT / source).exists() for source in sources)

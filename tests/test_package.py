"""What ships: every configuration composes, the wheel carries its configs, the examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import flowgrpo_rc
from flowgrpo_rc import assets
from flowgrpo_rc.config.compose import compose_config, config_folder, to_config

ROOT = Path(__file__).parents[1]
PROMPTS = f"[{assets.path('prompts/glyph_val.txt')}]"


@pytest.mark.parametrize("name", sorted(path.stem for path in config_folder().glob("*.yaml")))
def test_every_configuration_composes(name: str) -> None:
    files = (
        [] if name == "token_grpo" else [f"data.train_files={PROMPTS}", f"data.val_files={PROMPTS}"]
    )
    config = to_config(compose_config(files, config_name=name))
    assert config.rollout.n > 1


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


CAPPED = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.val_kwargs.n=16",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workplace")


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "WANDB_MODE": "offline"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize(
    "script", sorted((ROOT / "examples").glob("ocr_*.sh")), ids=lambda path: path.name
)
def test_examples_run(script: Path, workplace: Path) -> None:
    done = run_shell(f"bash {script} {' '.join(CAPPED)}", workplace)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "report.html" in done.stdout


def test_the_benchmark_prints_a_ratio(workplace: Path) -> None:
    script = ROOT / "examples" / "benchmark_overhead.py"
    done = run_shell(f"{sys.executable} {script} --rounds 1 rollout.n=12", workplace)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"ratio \d\.\d+", done.stdout)


def test_public_names_are_in_the_modules_that_the_package_names() -> None:
    assert set(flowgrpo_rc._HOMES) == set(flowgrpo_rc.__all__) <= set(dir(flowgrpo_rc))
    for name, module in flowgrpo_rc._HOMES.items():
        own = vars(import_module(f"flowgrpo_rc.{module}"))[name]
        assert getattr(flowgrpo_rc, name) is own
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flowgrpo_rc.nothing

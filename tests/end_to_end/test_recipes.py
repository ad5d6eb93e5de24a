"""What the recipes for real models run composes, calibrates, and fits the card in their name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.compositions import checked_config

from flowgrpo_rc.calibration.choice import KEY, Settings
from flowgrpo_rc.config.compose import compose_config

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*xh?00.sh"))
REWARDS = ("ocr", "pickscore")

# In place of the two programs that a recipe calls: write down the command and, for a calibration,
# its result.
STAND_IN = """#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >> {log}; echo >> {log}
while [ $# -gt 0 ]; do
    if [ "$1" = --out ]; then
        mkdir -p "$2/calibration"
        cp {result} "$2/calibration/measured.yaml"
    fi
    shift
done
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder in which recipes run, with stand-ins for the programs in bin/."""
    rejection = {f"{KEY}.rollout_rs": "token_k1", f"{KEY}.rollout_rs_threshold": "auto:4"}
    values = {f"{KEY}.bypass_mode": False, "actor.diffusion_loss.clip_ratio": 4.2e-4} | rejection
    settings = Settings(values=values, reason="Made up for the test.", notes=[])
    (tmp_path / "result.yaml").write_text(settings.yaml(["Measured on nothing."]))
    (tmp_path / "bin").mkdir()
    for name in ("flowgrpo-rc", "accelerate"):
        program = tmp_path / "bin" / name
        program.write_text(STAND_IN.format(log=tmp_path / "log", result=tmp_path / "result.yaml"))
        program.chmod(0o755)
    return tmp_path


def run(workplace: Path, script: str, *arguments: str) -> list[list[str]]:
    """Returns the commands that a recipe runs."""
    environment = os.environ | {"PATH": f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "examples" / f"{script}.sh"), *arguments]
    subprocess.run(command, cwd=workplace, env=environment, check=True, capture_output=True)
    log = workplace / "log"
    commands = [shlex.split(line) for line in log.read_text().splitlines()]
    log.unlink()
    return commands


def cards(script: str) -> int:
    return int(re.search(r"_(\d+)xh", script)[1])


def parsed(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns options and overrides of `flowgrpo-rc`, or of what accelerate launches."""
    if command[0] == "accelerate":
        assert (ROOT / command[command.index("--config_file") + 1]).is_file()
        assert command[command.index("-m") + 1] == "flowgrpo_rc.train"
        command = command[command.index("-m") :]
    options: dict[str, str] = {}
    rest = command[2:]
    while rest[0].startswith("--"):
        options[rest[0]], rest = rest[1], rest[2:]
    return options, rest


@pytest.mark.parametrize(
    ("script", "reward"), [(script, REWARDS[i % 2]) for i, script in enumerate(SCRIPTS)]
)
def test_a_recipe_calibrates_and_then_trains_with_what_was_found(
    script: str, reward: str, workplace: Path
) -> None:
    commands = run(workplace, script, reward, "decoupled", "actor.optim.lr=1e-5")
    (measuring, measured), (training, overrides) = map(parsed, commands)
    assert commands[0][:2] == ["flowgrpo-rc", "calibrate"]
    assert measuring["--mode"] == "decoupled"
    assert training == {"--config-dir": measuring["--out"]}
    checked_config(compose_config(measured), num_processes=1)
    composed = compose_config(overrides, config_dir=str(workplace / measuring["--out"]))
    config = checked_config(composed, num_processes=cards(script))
    assert config.trainer.output_dir == f"outputs/{config.trainer.experiment_name}"
    assert config.trainer.experiment_name.endswith("_decoupled")
    assert [name for name, term in config.reward.terms.items() if term] == [reward]
    assert config.actor.optim.lr == 1e-5
    assert config.actor.diffusion_loss.clip_ratio == 4.2e-4
    correction = config.algorithm.rollout_correction
    assert not correction.bypass_mode
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("token_k1", "auto:4")
    if cards(script) > 1:
        assert commands[1][commands[1].index("--num_processes") + 1] == str(cards(script))


def test_a_recipe_measures_once(workplace: Path) -> None:
    script, *arguments = SCRIPTS[0], "ocr", "bypass"
    assert run(workplace, script, *arguments)[0][1] == "calibrate"
    (again,) = run(workplace, script, *arguments)
    assert "calibrate" not in again
    assert "+calibration=measured" in again

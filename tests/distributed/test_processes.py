"""One process or two: the same noise, the same images. What is then learned:
test_distributed.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import Train
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from flowgrpo_rc.config.checks import prompts_of
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.build import assemble, make_processes
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.training.trainer import Trainer

config = to_config(compose_config(sys.argv[2:]))
processes = make_processes(config)
folder = RunFolder(Path(config.trainer.output_dir))
parts = assemble(config, folder, processes, prompts_of(config), first_step=0)
Trainer(parts, None)
prompts = parts.source.prompts(1)
request = parts.task.request(prompts, parts.source._seeds(prompts))
chunks = list(parts.source.engine.generate(request))
save_file(
    {
        "group": torch.cat([chunk.batch.group for chunk in chunks]),
        "noise": torch.cat([normal((8, 8, 16), chunk.batch.seed.tolist(), "step", 1) for chunk in chunks]),
        "window": request.window,
        "latents": torch.cat([chunk.batch.all_latents for chunk in chunks]),
        "images": torch.cat([torch.from_numpy(chunk.samples) for chunk in chunks]),
    },
    f"{sys.argv[1]}/rank_{processes.rank}.safetensors",
)
parts.rewards.close()
"""


def launch(
    num_processes: int, *arguments: str, python_path: Path | None = None
) -> subprocess.CompletedProcess:
    """torchrun with `num_processes` gloo processes of one thread each."""
    launcher = [
        "torch.distributed.run",
        f"--nproc_per_node={num_processes}",
        f"--master_port={free_port()}",
    ]
    command = [sys.executable, "-m", *launcher, *arguments]
    environment = launch_environment(python_path)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def launch_environment(*folders: Path | None) -> dict[str, str]:
    """One thread to a process; modules come from this checkout and `folders`."""
    paths = [str(folder) for folder in (ROOT, *folders) if folder is not None]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def settings(overrides: list[str]) -> list[str]:
    return [*overrides, "trainer.total_training_steps=3", "rollout.pipeline.guidance_scale=2.0"]


def test_same_draws_and_images(settings: list[str], tmp_path: Path) -> None:
    program = tmp_path / "draw.py"
    program.write_text(textwrap.dedent(PROGRAM))
    gathered = []
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        done = launch(num_processes, str(program), str(folder), *settings)
        assert done.returncode == 0, done.stderr[-3000:]
        ranks = [load_file(path) for path in sorted(folder.glob("rank_*"))]
        assert len(ranks) == num_processes
        together = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
        order = torch.sort(together["group"], stable=True).indices
        gathered.append({name: value[order] for name, value in together.items()})
    one, two = gathered
    assert torch.equal(one["group"], two["group"])
    assert torch.equal(one["noise"], two["noise"])
    assert torch.equal(one["window"], two["window"])
    torch.testing.assert_close(one["latents"], two["latents"], atol=1e-5, rtol=0)
    assert (one["images"].int() - two["images"].int()).abs().max() <= 1


def test_a_number_of_processes_that_does_not_fit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("actor.ppo_mini_batch_size=1") == 2
    assert "actor.ppo_mini_batch_size=1" in capsys.readouterr().err

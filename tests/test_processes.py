"""One process or two: the same noise, the same images, the same LoRA."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import read_rows, without_timings
from safetensors.torch import load_file

from flowgrpo_rc import assets

PROGRAM = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from flowgrpo_rc.compose import compose_config, to_config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.run import assemble, make_processes
from flowgrpo_rc.training.run_folder import RunFolder
from flowgrpo_rc.training.trainer import Trainer

config = to_config(compose_config(sys.argv[2:]))
processes = make_processes(config)
folder = RunFolder(Path(config.trainer.output_dir))
parts = assemble(config, folder, processes, config.read_prompts(), first_step=0)
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


SMOOTH_REWARD = """
from flowgrpo_rc.rewards.base import Reward, Scores

class Brightness(Reward):
    def __call__(self, images, prompts):
        return Scores(values=(images / 255).mean((1, 2, 3)).tolist())
"""


def launch(num_processes: int, *arguments: str, python_path: Path | None = None) -> subprocess.CompletedProcess:
    """torchrun with `num_processes` gloo processes of one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["torch.distributed.run", f"--nproc_per_node={num_processes}", f"--master_port={port}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(python_path or "")}
    command = [sys.executable, "-m", *launcher, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


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


RULES = "algorithm.rollout_correction"
# What is shared by the processes, or follows from means that the rollout keeps.
OF_BYPASS = (
    f"{RULES}.rollout_rs=[token_k1,step_kl]",
    f"{RULES}.rollout_rs_threshold=auto:4",
    f"{RULES}.bypass_level=window",
    "actor.diffusion_loss.loss_mode=grpo_guard",
)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_same_lora_after_three_steps(settings: list[str], tmp_path: Path, mode: str) -> None:
    """With a smooth reward; a jump (JPEG sizes, read letters) would enlarge differences of 1e-8 in the images.

    On the bundled model, whose images differ in brightness: on the flat ones of random weights, the rounding of pixels
    to 8 bits is a thousandth of a group's standard deviation.
    """
    (tmp_path / "smooth_reward.py").write_text(SMOOTH_REWARD)
    correction = "algorithm.rollout_correction"
    settings = [
        *settings,
        f"model.path={assets.path('tiny_glyph_sd3')}",
        f"{correction}.bypass_mode={mode == 'bypass'}",
        f"{correction}.rollout_is_batch_normalize={mode == 'decoupled'}",
        *(OF_BYPASS if mode == "bypass" else ()),
        "rollout.val_kwargs.n=5",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "actor.optim.lr=1e-4",  # Adam makes steps of this size, however small and noisy the gradient
        "reward.terms.jpeg=null",
        "reward.terms.mine._target_=smooth_reward.Brightness",
    ]
    runs = []
    for num_processes in (1, 2):
        run = tmp_path / str(num_processes)
        command = ("-m", "flowgrpo_rc.train", *settings, f"trainer.output_dir={run}")
        done = launch(num_processes, *command, python_path=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append((load_file(run / "lora" / "pytorch_lora_weights.safetensors"), without_timings(read_rows(run))))
    (one, rows_one), (two, rows_two) = runs
    assert one.keys() == two.keys()
    assert max(tensor.abs().max() for name, tensor in one.items() if "lora_B" in name) > 1e-4
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=0)
    for row_one, row_two in zip(rows_one, rows_two, strict=True):
        assert row_one.keys() == row_two.keys()
        for name in row_one.keys() - {"actor/grad_norm"}:
            assert row_one[name] == pytest.approx(row_two[name], rel=1e-3, abs=1e-4), name


def test_a_number_of_processes_that_does_not_fit(settings: list[str], tmp_path: Path) -> None:
    done = launch(2, "-m", "flowgrpo_rc.train", *settings, "actor.ppo_mini_batch_size=1")
    assert done.returncode != 0
    assert "actor.ppo_mini_batch_size=1" in done.stderr

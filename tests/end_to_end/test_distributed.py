"""One process or several, replicated or sharded: the same LoRA to 1e-10 in float64.

A signal or a time limit stops a run that goes on later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.documented import ROOT
from support.launching import (
    SCONTROL,
    alone,
    free_port,
    launch,
    launch_environment,
    no_process_of,
    ran,
    train_command,
    wait_for,
)
from support.marks import slow
from support.ray import needs_ray
from support.runs import NFT, SMALL_TEXT, WORDS, num_rows, read_rows, without_timings

from flowgrpo_rc import assets
from flowgrpo_rc.cli import main
from flowgrpo_rc.commands import composing
from flowgrpo_rc.records.checkpoint import load_checkpoint

RC = "algorithm.rollout_correction"
MODES = {
    "decoupled": (
        f"{RC}.bypass_mode=false",
        f"{RC}.rollout_is=sequence",
        f"{RC}.rollout_is_batch_normalize=true",
    ),
    # What runs forwards of its own: the reference policy, the recomputed activations, a window for
    # each sample.
    "bypass": (
        f"{RC}.bypass_mode=true",
        f"{RC}.rollout_is_batch_normalize=false",
        "actor.use_kl_loss=true",
        "model.gradient_checkpointing=true",
        "rollout.algo.window_sharing=sample",
        "rollout.algo.shared_prefix=false",
        "rollout.pipeline.guidance_scale=2",
        "rollout.val_kwargs.guidance_scale=null",
        "rollout.val_kwargs.height=48",
        "rollout.val_kwargs.width=48",
    ),
    # What is shared by the processes, or follows from means that the rollout keeps; with a
    # mismatch, which sharded weights would change: they cannot be merged.
    "window": (
        "model.decode_batch_size=4",
        "rollout.dtype=fp32",
        "rollout.merge_lora=false",
        f"{RC}.bypass_mode=true",
        f"{RC}.rollout_is_batch_normalize=false",
        f"{RC}.rollout_rs=[token_k1,step_kl]",
        f"{RC}.rollout_rs_threshold=auto:4",
        f"{RC}.bypass_level=window",
        "actor.diffusion_loss.loss_mode=grpo_guard",
        "algorithm.adv_estimator=grpo",
        "rollout.micro_batch_size_per_gpu=2",
    ),
    # A group of samples that start from one state, with fewer evaluations behind a sliding window,
    # of which some are trained on.
    "fast": (
        "rollout.n=4",
        "actor.train_n=2",
        "rollout.merge_lora=true",
        "rollout.algo.sde_window_interval=1",
        "rollout.algo.tail=ab2",
        "rollout.algo.tail_steps=1",
        "rollout.algo.shared_prefix=true",
        "rollout.algo.sde_type=dance_sde",
        "rollout.algo.noise_level=0.3",
        f"{RC}.bypass_mode=true",
    ),
    # Groups that are dropped on one process, and further prompts for it alone; samples in bf16.
    "filtered": (
        "rollout.dtype=bf16",
        "rollout.merge_lora=rounded",
        "rollout.micro_batch_size_per_gpu=2",
        f"{RC}.bypass_mode=true",
        "algorithm.filter_groups.enable=true",
        "reward.terms.jpeg=null",
        "+reward.terms.picky={_target_: function, path: 'support.prompts:picky'}",
    ),
    # Finished samples, whose noise each process draws, and an old policy of its own.
    "forward": (*NFT, "actor.use_kl_loss=true", "actor.kl_reference=start"),
}
ASKED = ("decoupled", "bypass")  # a suite in each evaluation
TRAIN = ("-m", "flowgrpo_rc.train")
FP64 = ("model.dtype=fp64", "rollout.dtype=fp64", "trainer.device=cpu")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


def settings(workplace: Path, mode: str) -> list[str]:
    """Overrides of three small steps of the bundled model.

    Of 5 held-out prompts one process of two has 3, the other 2.
    """
    words = workplace / "words.txt"
    words.write_text("".join(f'"{word}"\n' for word in WORDS))
    suite = workplace / "suite.yaml"
    suite.write_text("prompts: words.txt\nreward: {terms: {jpeg: {}}}\nn: 3\nseeds: 1\n")
    asked = [f"trainer.suites=[{suite}]"] if mode in ASKED else []
    if mode == "forward":
        asked.append(f"model.lora_path={trained_alone(workplace, 'fast') / 'lora'}")
    given = [
        *asked,
        *FP64,
        "model.lora_rank=4",
        "model.lora_alpha=8",
        f"data.train_files={words}",
        f"data.val_files={words}",
        "data.allow_overlap=true",
        "data.train_batch_size=4",
        "rollout.n=2",
        "rollout.micro_batch_size_per_gpu=null",
        "rollout.pipeline.num_inference_steps=4",
        "rollout.algo.sde_window_size=2",
        "rollout.algo.sde_window_range=[0,3]",
        "rollout.val_kwargs.num_inference_steps=2",
        "rollout.val_kwargs.n=5",
        "rollout.val_kwargs.batch_size=1",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "actor.optim.lr_scheduler=constant",
        "reward.terms.ocr=null",
        "reward.terms.jpeg.weight=1.0",
        "trainer.total_training_steps=3",
        *MODES[mode],
    ]
    return [*{word.partition("=")[0]: word for word in given}.values()]  # a key once


def trained_alone(workplace: Path, mode: str) -> Path:
    """Returns the folder of the run with one process, made once."""
    run = workplace / f"alone_{mode}"
    if not run.exists():
        assert main(["train", *settings(workplace, mode), f"trainer.output_dir={run}"]) == 0
    return run


def assert_same_training(one: Path, other: Path, *, rows_from: int = 0) -> None:
    """Weights, moments and average after the last step agree to 1e-10, metrics to 1e-8.

    Held-out texts are the same. Pictures agree to one of 255 levels, since the VAE is fp32 and
    batches of other sizes round otherwise.
    """
    ours, theirs = (load_checkpoint(run / "checkpoints" / "step_3") for run in (one, other))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for stem, tensors in ours.tensors.items():
        if stem in ("auto_bands", "auto_clip"):  # observations, in the order of the processes
            continue
        assert tensors.keys() == theirs.tensors[stem].keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == (torch.float32 if name.endswith(".step") else torch.float64)
            torch.testing.assert_close(theirs.tensors[stem][name], tensor, atol=1e-10, rtol=0)
    lora = ours.tensors["lora"]
    assert max(lora[name].abs().max() for name in lora if "lora_B" in name) > 1e-4
    rows = (without_timings(read_rows(run))[rows_from:] for run in (one, other))
    for mine, its in zip(*rows, strict=True):
        assert its == pytest.approx(mine, rel=1e-8, abs=1e-8)
    (sample,) = (one / "samples").glob("step_000003.*")
    shown = (sample, other / "samples" / sample.name)
    if sample.suffix == ".png":
        mine, its = (np.asarray(Image.open(path)).astype(int) for path in shown)
        assert np.abs(mine - its).max() <= 1
    else:
        assert shown[0].read_bytes() == shown[1].read_bytes()


def trained_by_two(workplace: Path, strategy: str, mode: str) -> Path:
    """Returns the folder of the run with two processes, made once."""
    run = workplace / f"{strategy}_{mode}"
    if not run.exists():
        options = (f"trainer.strategy={strategy}", f"trainer.output_dir={run}")
        launch(2, *TRAIN, *settings(workplace, mode), *options)
    return run


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", "decoupled"),
        slow("fsdp2", "bypass"),
        slow("ddp", "window"),
        slow("ddp", "fast"),
        slow("ddp", "filtered"),
        slow("fsdp2", "forward"),
    ],
)
def test_two_processes_train_what_one_does(workplace: Path, strategy: str, mode: str) -> None:
    run = trained_by_two(workplace, strategy, mode)
    assert_same_training(trained_alone(workplace, mode), run)


@pytest.mark.slow
@needs_ray
def test_two_processes_share_a_worker(workplace: Path) -> None:
    run = workplace / "workers"
    options = ("trainer.num_processes=2", "rollout.workers=1", f"trainer.output_dir={run}")
    done = train_command(*settings(workplace, "filtered"), *options, "trainer.strategy=fsdp2")
    assert all("reward 'picky' failed" in line for line in done.stderr.splitlines())
    assert_same_training(trained_alone(workplace, "filtered"), run)


# A stand-in of Slurm's `srun`: it starts the tasks of two nodes, warns those of the first job as
# --signal asks, and returns the highest exit code.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
if ! [ -e requeued ]; then
    until [ "$(cat slurm/metrics.jsonl 2>/dev/null | wc -l)" -ge 2 ]; do sleep 0.05; done
    kill -USR1 "$first" "$second"
fi
highest=0
for task in "$first" "$second"; do
    code=0
    wait "$task" || code=$?
    if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""


@pytest.mark.slow
def test_a_slurm_job_on_two_nodes_is_requeued_and_trains_what_one_process_does(
    workplace: Path,
) -> None:
    """Runs examples/slurm.sh twice, as Slurm would: its time limit comes in the second step."""
    tools = workplace / "tools"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    job_id = str(free_port() - 20000)
    job = {
        "PATH": path,
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": job_id,
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_LOCALID": "0",
    }
    run = workplace / "slurm"
    options = ("trainer.strategy=fsdp2", f"trainer.output_dir={run}")
    command = ["bash", ROOT / "examples/slurm.sh", *settings(workplace, "decoupled"), *options]

    def submit() -> str:
        done = ran(*command, env=launch_environment() | job, cwd=workplace)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "stopped early (SIGUSR1)" in submit()
    assert read_rows(run)[-1]["step"] < 3
    submit()
    assert (workplace / "requeued").read_text().split() == [job_id]
    assert_same_training(trained_alone(workplace, "decoupled"), run)


@pytest.mark.slow
def test_a_run_goes_on_with_two_processes_and_with_one_again(workplace: Path) -> None:
    run = workplace / "resumed"
    command = [*settings(workplace, "decoupled"), f"trainer.output_dir={run}"]
    assert main(["train", *command, "trainer.total_training_steps=1"]) == 0
    sharded = ("trainer.total_training_steps=2", "trainer.strategy=fsdp2")
    launch(2, *TRAIN, *command, *sharded)
    assert main(["train", *command]) == 0
    assert_same_training(trained_alone(workplace, "decoupled"), run, rows_from=3)


@pytest.mark.slow
def test_two_processes_train_a_language_model_as_one_does(workplace: Path) -> None:
    """Responses have unequal lengths.

    A process with sharded weights that has finished goes on until all have.
    """
    words = [
        *SMALL_TEXT,
        *FP64,
        "rollout.micro_batch_size_per_gpu=4",
        "rollout.val_kwargs.n=5",
        "rollout.val_kwargs.batch_size=1",
        "rollout.val_kwargs.temperature=1.0",
        "trainer.total_training_steps=3",
    ]
    one, two = workplace / "text_one", workplace / "text_two"
    assert main(["train", *words, f"trainer.output_dir={one}"]) == 0
    launch(2, *TRAIN, *words, "trainer.strategy=fsdp2", f"trainer.output_dir={two}")
    assert read_rows(one)[-1]["response/length_min"] < read_rows(one)[-1]["response/length_max"]
    assert_same_training(one, two)


# Two blocks of mixed precision with a LoRA each; what is compared is the same network whole.
SHARDS = """
import copy, socket, torch
from datetime import timedelta
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from flowgrpo_rc.distributed.sharding import shard_frozen_weights

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(8, 8).to(torch.bfloat16), nn.LayerNorm(8)
        self.lora = nn.Parameter(torch.randn(8, 8))
    def forward(self, x):
        return self.norm(self.base(x.bfloat16()).float() + x @ self.lora)

class Network(nn.Module):
    _no_split_modules = ["Block"]
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(2))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block.__call__, x, use_reentrant=False)
        return x

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
for machines in ("aaaa", "aabb", "abcd", "aabc"):
    network = Network()
    whole = copy.deepcopy(network)
    machine = machines[dist.get_rank()]
    socket.gethostname = lambda: machine
    parts = 4 if machines == "abcd" else machines.count(machine)
    shard_frozen_weights([network], torch.device("cpu"), timedelta(seconds=60))
    frozen = {name: p for name, p in network.named_parameters() if not p.requires_grad}
    assert all(isinstance(p, DTensor) for p in frozen.values())
    others = [p for name, p in network.named_parameters() if name not in frozen]
    assert not any(isinstance(p, DTensor) for p in others)
    here = sum(p.to_local().numel() for p in frozen.values())
    assert here * parts == sum(p.numel() for p in frozen.values()), here
    with torch.no_grad():
        assert torch.equal(network(x), whole(x))
    for net in (network, whole):
        net(x).square().sum().backward()
    for block, other in zip(network.blocks, whole.blocks):
        assert torch.equal(block.lora.grad, other.lora.grad) and block.lora.grad.abs().sum() > 0
    freed = isinstance(network.blocks[0].base.weight, DTensor)
    assert freed, "gathered weights are freed after the backward"
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_frozen_weights_are_split_inside_a_node_and_change_nothing(tmp_path: Path) -> None:
    program = tmp_path / "shards.py"
    program.write_text(SHARDS)
    launch(4, str(program))


@pytest.mark.slow
def test_a_signal_to_own_processes_saves_and_the_same_command_goes_on(
    overrides: list[str], tmp_path: Path
) -> None:
    """It goes to the group, as Ctrl-C does."""
    run = tmp_path / "run"
    settings = [*overrides, "trainer.num_processes=2", "actor.optim.lr_scheduler=constant"]
    settings.append(f"data.val_files={assets.path('prompts/glyph_val.txt')}")
    process = subprocess.Popen(
        [sys.executable, *TRAIN, *settings, "trainer.total_training_steps=500"],
        env=alone(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: num_rows(run) >= 2)
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 75
    *again, last = errors.splitlines()
    assert last == "stopping after this step; again to end now"
    (warning,) = [line for line in again if "given again" not in line][1:]
    assert "the held-out prompts are those of the package" in warning
    assert said.count("stopped early (SIGINT)") == 1
    newest = read_rows(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{newest}").is_dir()
    assert no_process_of(run)
    length = f"trainer.total_training_steps={newest + 1}"
    assert main(["train", *settings, "trainer.num_processes=1", length]) == 0
    assert read_rows(run)[-1]["step"] == newest + 1


def test_bad_input_is_said_once_before_anything_is_started(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(composing, "launch", lambda *command: pytest.fail("started"))
    command = ["train", *overrides, "trainer.num_processes=2"]
    assert main([*command, "trainer.num_processes=3"]) == 2
    assert main([*command, "model.path=nowhere"]) == 2
    said = capsys.readouterr().err.splitlines()
    first, second = [line for line in said if line.startswith("error: ")]
    assert "actor.ppo_mini_batch_size=2" in first
    assert "nowhere" in second
    assert main([*command, "--dry-run"]) == 0
    assert main([*command, "--cfg", "job"]) == 0

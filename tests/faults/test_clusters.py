"""A run on a Ray cluster of several machines gives the bits of a run on one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.documented import ROOT
from support.faults import Trained, command, fault, started, words_of
from support.launching import SCONTROL, all_gone, alone, free_port, launch, marked, ran, wait_for
from support.machines import LINK, two_machines
from support.ray import needs_ray
from support.runs import final_state, read_rows

from flowgrpo_rc.cli import main

pytestmark = needs_ray
BIN = Path(sys.executable).parent
CHUNKS = "rollout.micro_batch_size_per_gpu=2"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands whose processes are told by `tmp_path`, and end with the test."""
    yield alone(ROOT / "tests") | {
        "FLOWGRPO_RC_TEST": str(tmp_path),
        "PATH": f"{tmp_path}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ray_node(environment: dict[str, str]) -> Iterator[Callable[..., None]]:
    """Starts a machine of a Ray cluster, by its name and options of `ray start`."""
    nodes = []

    def start(name: str, *options: str) -> None:
        node = subprocess.Popen(
            ["ray", "start", "--block", "--num-cpus=1", *options],
            env=environment | {"FLOWGRPO_RC_NODE": name},
            cwd="/",  # another than the trainer's
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        nodes.append(node)

    yield start
    for node in reversed(nodes):
        node.terminate()
        node.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@fault("the token of a Ray cluster is missing", "one line says so")
def test_no_token(small: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = words_of(small, "rollout.workers=1", f"rollout.ray_address={address}")
        ended = command(*words, harm=lambda: os.environ.update(environment))
    refused = f"error: rollout.ray_address={address} cannot be reached"
    ended.expect(1, refused, "no authentication token was found")


@fault("a Ray cluster has no room for a worker", "one line names the keys")
@fault("a machine joins the cluster of rollout workers, and is lost", "both sample; equal results")
def test_a_cluster(
    small: list[str],
    checkpoint: Path,
    ray_node: Callable[..., None],
    environment: dict[str, str],
    tmp_path: Path,
    trained: Callable[[Sequence[str]], Trained],
) -> None:
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32}
    port = free_port()
    address = f"rollout.ray_address=127.0.0.1:{port}"
    ray_node("first", "--head", f"--port={port}", "--include-dashboard=false")
    wait_for(lambda: listens(port))
    too_large = ("rollout.workers=1", "rollout.cpus_per_worker=2", "rollout.worker_timeout_s=5")
    words = words_of(small, address, *too_large)
    error = command(*words, harm=lambda: os.environ.update(environment)).expect(1).error()
    assert error == (
        "error: no rollout worker has started within rollout.worker_timeout_s=5: each asks for 2 "
        "cores (rollout.cpus_per_worker) and 0 GPUs (rollout.gpus_per_worker), and the cluster has "
        "1 and 0"
    )

    words = words_of(
        small,
        CHUNKS,
        address,
        "rollout.workers=2",
        "rollout.name=support.worker_engines.OnTwoNodes",
        f"+rollout.engine_kwargs.folder={tmp_path}",
        f"model.path={os.path.relpath(checkpoint)}",
    )

    def train() -> int:
        os.environ.update(environment)
        return main(words)

    with started(train, timeout=300) as process:
        assert process.wait_until((tmp_path / "met_first").exists), process.output()
        ray_node("second", f"--address=127.0.0.1:{port}")
        assert process.wait_until((tmp_path / "hangs").exists), process.output()
        for pid in {*marked(str(tmp_path))} & {*marked("FLOWGRPO_RC_NODE=second")}:
            os.kill(pid, signal.SIGKILL)
        process.wait().expect(0, "a rollout worker was lost (1 of 3 restarts)")
    run = tmp_path / "run"
    assert [row["workers/ready"] for row in read_rows(run)[1:]] == [1, 2, 1]
    assert final_state(run) == trained([*small, CHUNKS]).state


@fault("a machine that trains has not joined the Ray cluster", "one line says where, and how")
def test_two_machines_train_and_sample(
    small: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """They train what two processes of one machine do; the second forgets to join at first."""
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32, "WORLD_SIZE": "2"}
    words = words_of(small, CHUNKS, "rollout.workers=2")[1:]
    with two_machines() as machines:
        host = machines[0].address
        engine = "rollout.name=support.worker_engines.OnBothNodes"
        train = [sys.executable, "-m", "flowgrpo_rc.train", *words, engine]
        train += [f"rollout.ray_address={host}:6379", f"+rollout.engine_kwargs.folder={tmp_path}"]
        environment |= {"MASTER_ADDR": host, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINK}
        environment |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        options = ["--head", "--port=6379", "--include-dashboard=false"]
        trainers = []
        for rank, (machine, name) in enumerate(zip(machines, ("first", "second"), strict=True)):
            given = environment | {"RANK": str(rank), "FLOWGRPO_RC_NODE": name}
            if rank == 1:
                refused = ran(*machine.words(*train), env=given)
                assert refused.returncode == 2
                assert refused.stderr.startswith(
                    f"error: rollout.ray_address={host}:6379: {machine.address} trains and has not "
                    f"joined the Ray cluster (joined: {host}). Before the training, run there: "
                    f"ray start --address={host}:6379 --node-ip-address={machine.address} "
                )
                options = [f"--address={host}:6379"]
            join = ["ray", "start", f"--node-ip-address={machine.address}", "--num-cpus=1"]
            subprocess.run(machine.words(*join, *options), env=given, check=True)
            trainers.append(subprocess.Popen(machine.words(*train), env=given))
        assert [trainer.wait(timeout=300) for trainer in trainers] == [0, 0]
    launch(2, "-m", "flowgrpo_rc.train", *words, f"trainer.output_dir={tmp_path / 'one_machine'}")
    assert final_state(tmp_path / "run") == final_state(tmp_path / "one_machine")


# Stand-ins of Slurm's commands for a job on two nodes, both on this machine.
SLURM = {
    "scontrol": SCONTROL,
    "srun": """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
""",
}


@fault("a Slurm job with rollout workers is over", "no process is left; requeued, it goes on")
def test_a_slurm_job(
    small: list[str], environment: dict[str, str], tmp_path: Path, whole: Trained
) -> None:
    """Runs examples/slurm_workers.sh as Slurm would."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment |= {
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    words = ["bash", str(ROOT / "examples/slurm_workers.sh"), *small, "rollout.workers=1"]
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(words, env=environment, stdout=output, stderr=output) as job,
    ):
        wait_for((tmp_path / "run" / "checkpoints" / "step_1").exists)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=300) == 0, log.read_text()
    assert all_gone(str(tmp_path), seconds=20)
    assert "stopped early (SIGUSR1)" in log.read_text()
    assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    assert len(read_rows(tmp_path / "run")) < 4
    command(*words_of(small)).expect(0)  # without workers
    assert final_state(tmp_path / "run") == whole.state

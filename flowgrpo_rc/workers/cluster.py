"""The Ray cluster that a run samples on, one of its own or one that is running, and its workers.

Ray is imported when the workers start, once it has been told where to listen.
"""

import atexit
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.rollout.devices import VARIABLE, changed, visible_gpus
from flowgrpo_rc.rollout.engine import EngineError, RolloutEngine

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tells nobody that it is used
    "RAY_worker_niceness": "0",  # workers are no less urgent than the trainer
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning about actors without a GPU
}
# Ray listens on the loopback alone only where it believes that no other machine can join. It
# decides that as it is imported. Its own token would lie in the home folder, for every cluster.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
_TOKEN = "RAY_AUTH_TOKEN"
_HOST = "127.0.0.1"
_CONNECT_S = 10.0
_NODES = """import sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values()
print(*(node.node_manager_address for node in nodes if node.state == node.ALIVE))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A Ray cluster that this process has joined; `token` is empty if no run has started it."""

    address: str
    namespace: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Says what a pool of workers is made of.

    `staleness` is how many versions of the LoRA are in use besides the newest. With `in_turn` as
    many workers of a machine load at once as its host takes: there a model is on its way to a GPU.
    """

    num_workers: int
    num_cpus: int
    num_gpus: float
    timeout_s: float
    max_restarts: int
    staleness: int
    chunk_size: int
    in_turn: bool


def start_workers(
    make_engine: Callable[[], RolloutEngine[Any]],
    settings: PoolSettings,
    processes: Processes,
    *,
    address: str | None,
) -> RolloutEngine[Any]:
    """Starts workers that all processes of a run share; each process calls this.

    They join the Ray cluster at `address`, or start one on this machine if that is None. ValueError
    if the trainer leaves too few GPUs, EngineError if no worker starts.
    """
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", processes.count))
    if address is None and num_here < processes.count:
        raise ValueError(
            f"rollout.workers={settings.num_workers}: the trainer's processes are on several "
            "machines. Have all of them join a Ray cluster, and give its rollout.ray_address"
        )
    cluster = None
    if processes.is_main:
        workers = settings.num_workers
        gpus = None
        if address is None:
            gpus = spare_gpus(processes.device, num_here, workers, settings.num_gpus)
        cluster = start_or_join(address, workers * settings.num_cpus, gpus)
    cluster, *_ = processes.gather_objects([cluster])
    if not processes.is_main:
        assert cluster is not None
        join(cluster)
    # From here on Ray may be imported: it has been told where to listen.
    import ray

    from flowgrpo_rc.workers.engine import WorkersEngine

    try:
        if processes.is_main:
            engine = WorkersEngine(make_engine, settings, processes.device)
        processes.wait()  # for the pool
        return engine if processes.is_main else WorkersEngine(None, settings, processes.device)
    except Exception:
        ray.shutdown()
        raise


def spare_gpus(
    device: torch.device, num_trainers: int, num_workers: int, share: float
) -> str | None:
    """Returns the GPUs that no trainer uses, for CUDA_VISIBLE_DEVICES; None if `share` is 0."""
    if share == 0:
        return None
    wanted = num_workers * share if share >= 1 else math.ceil(num_workers / int(1 / share))
    visible = visible_gpus()
    training = num_trainers if device.type == "cuda" else 0
    spare = visible[training:]
    if len(spare) < wanted:
        raise ValueError(
            f"rollout.workers={num_workers}: with {share:g} GPUs each (rollout.gpus_per_worker) "
            f"they need {wanted:g}, and of {len(visible)} GPUs here {training} train. Lower one of "
            "them; rollout.gpus_per_worker=0 shares the trainer's first GPU"
        )
    return ",".join(spare)


def start_or_join(address: str | None, num_cpus: int, gpus: str | None) -> Cluster:
    """Starts a cluster on this machine, or joins the one at `address`, with a namespace of its own.

    A cluster that is started listens on 127.0.0.1 alone, asks for a token, and ends with this
    process. Of the GPUs that this process sees it has those in `gpus`; None for all.
    """
    namespace = f"flowgrpo_rc_{uuid.uuid4().hex}"
    if address is not None:
        os.environ.update(_SETTINGS)
        return _connected(address, namespace)
    if "ray" in sys.modules and not _LOCAL.items() <= os.environ.items():
        raise EngineError(
            "rollout.workers: Ray was imported before the run, and would listen on every network. "
            f"Set {' and '.join(f'{name}={value}' for name, value in _LOCAL.items())} before"
        )
    # Ray reads it once in a process, also for a second run.
    token = os.environ.get(_TOKEN) or secrets.token_hex(32)
    os.environ.update(_SETTINGS | _LOCAL | {_TOKEN: token})
    # Others may write to the folder that Ray would make, and sockets want short paths.
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Ray's processes take the environment over.
    with changed({} if gpus is None else {VARIABLE: gpus}):
        cluster = _connected(
            "local", namespace, num_cpus=num_cpus, include_dashboard=False, _temp_dir=folder
        )
    if not cluster.address.startswith(f"{_HOST}:"):
        import ray

        ray.shutdown()
        raise EngineError(
            f"rollout.workers: Ray listens on {cluster.address}, where others could reach it, and "
            f"not on {_HOST}: give the rollout.ray_address of a cluster that is closed to others"
        )
    return replace(cluster, token=token)


def join(cluster: Cluster) -> None:
    """Connects another process of a run to its cluster."""
    os.environ.update(_SETTINGS)
    if cluster.token:
        os.environ.update(_LOCAL | {_TOKEN: cluster.token})
    _connected(cluster.address, cluster.namespace)


def check_reachable(address: str) -> None:
    """Raises ValueError if nobody listens at an address, or this machine is not in its cluster.

    Ray would try for minutes, after the model was loaded.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
            own_address = connection.getsockname()[0]
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"rollout.ray_address={address} cannot be reached: {error}. Give HOST:PORT of the head "
            "of a running Ray cluster, auto for the one of this machine, or null to start one"
        ) from error
    deadline = time.monotonic() + _CONNECT_S  # one that has just been started may not be listed
    while (joined := _joined(address)) and not any(map(_is_here, joined)):
        if time.monotonic() > deadline:
            raise ValueError(
                f"rollout.ray_address={address}: {own_address} trains and has not joined the Ray "
                f"cluster (joined: {', '.join(joined)}). Before the training, run there: ray start "
                f"--address={address} --node-ip-address={own_address} --num-cpus=0 --num-gpus=0 "
                "(or with the cores and GPUs that may sample)"
            )
        time.sleep(1.0)


def _joined(address: str) -> list[str]:
    """Returns the addresses of a cluster's machines; none if it refuses: Ray will then say why."""
    command = [sys.executable, "-c", _NODES, address]
    with contextlib.suppress(subprocess.TimeoutExpired):
        # In a process of its own: Ray ends one that asks without a token.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONNECT_S)
        return done.stdout.split()
    return []


def _is_here(address: str) -> bool:
    """Returns whether an address is one of this machine's: a socket takes no other one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _connected(address: str, namespace: str, **local: Any) -> Cluster:
    import ray

    if ray.is_initialized():
        raise EngineError("rollout.workers: call ray.shutdown() before the run: Ray is connected")
    try:
        with _own_signals():
            context: Any = ray.init(
                address=address,
                namespace=namespace,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **local,
            )
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise EngineError(f"rollout.ray_address={address} cannot be reached: {error}") from error
    return Cluster(address=context.address_info["gcs_address"], namespace=namespace)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps Ray from SIGTERM, which it takes over, and its processes from signals to a group."""
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

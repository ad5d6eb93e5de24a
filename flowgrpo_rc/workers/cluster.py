"""The Ray cluster that a run samples on: one of its own, or one that is running."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowgrpo_rc.rollout.engine import EngineError

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tells nobody that it is used
    "RAY_worker_niceness": "0",  # workers are no less urgent than the trainer
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning about actors without a GPU
}
# Ray listens on the loopback alone only where it believes that no other machine can join. It
# decides that as it is imported. Its own token would lie in the home folder, for every cluster.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
_TOKEN = "RAY_AUTH_TOKEN"
_GPUS = "CUDA_VISIBLE_DEVICES"
_HOST = "127.0.0.1"
_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
      address: by which other processes of the run connect.
      namespace: of the run's actors.
      token: a secret of a cluster that the run has started; nobody connects without it. Empty for a
        cluster that was running, whose token Ray finds by itself.
    """

    address: str
    namespace: str
    token: str = field(default="", repr=False)


def spare_gpus(visible: Sequence[str], num_trainers: int, num_wanted: float) -> str | None:
    """Returns the GPUs of this machine that no trainer process uses, for CUDA_VISIBLE_DEVICES.

    Args:
      visible: the GPUs that the trainers see; each takes one, from the first on.
      num_trainers: processes of the trainer on this machine.
      num_wanted: how many GPUs all workers ask for; 0 if they ask for none.

    Returns:
      The GPUs; None if none are asked for.

    Raises:
      ValueError: there are fewer.
    """
    if num_wanted == 0:
        return None
    spare = visible[num_trainers:]
    if len(spare) < num_wanted:
        raise ValueError(
            f"rollout.workers: they ask for {num_wanted:g} GPUs (workers x "
            f"rollout.gpus_per_worker), and of {len(visible)} GPUs here {num_trainers} train. "
            "Lower one of them, or set rollout.gpus_per_worker=0 to have the workers share the "
            "first GPU with the trainer"
        )
    return ",".join(spare)


def start_or_join(address: str | None, num_cpus: int, gpus: str | None = None) -> Cluster:
    """Starts a cluster on this machine, or joins one that is running, with a namespace of its own.

    A cluster that is started has no dashboard, listens on 127.0.0.1 alone, asks for a token of its
    own, and ends with this process.

    Args:
      address: of a running cluster; None to start one.
      num_cpus: cores of a cluster that is started.
      gpus: the GPUs of a cluster that is started; None for all that this process sees.

    Raises:
      EngineError: Ray would listen on other addresses, or cannot be reached.
    """
    namespace = f"flowgrpo_rc_{uuid.uuid4().hex}"
    if address is not None:
        os.environ.update(_SETTINGS)
        return _connected(address, namespace)
    if "ray" in sys.modules and not _LOCAL.items() <= os.environ.items():
        raise EngineError(
            "rollout.workers: Ray was imported before the run, so that it would listen on every "
            "network of this machine. Import it after the run has started, or set "
            f"{' and '.join(f'{name}={value}' for name, value in _LOCAL.items())} before"
        )
    return _started(namespace, num_cpus, gpus)


def _started(namespace: str, num_cpus: int, gpus: str | None) -> Cluster:
    # Ray reads it once in a process, also for a second run.
    token = os.environ.get(_TOKEN) or secrets.token_hex(32)
    os.environ.update(_SETTINGS | _LOCAL | {_TOKEN: token})
    seen = os.environ.get(_GPUS)
    if gpus is not None:
        os.environ[_GPUS] = gpus  # Ray's processes take it over; this one has found its own
    try:
        cluster = _connected("local", namespace, num_cpus=num_cpus, include_dashboard=False)
    finally:
        if gpus is not None:
            os.environ.pop(_GPUS)
            os.environ.update({} if seen is None else {_GPUS: seen})
    if not cluster.address.startswith(f"{_HOST}:"):
        import ray

        ray.shutdown()
        raise EngineError(
            f"rollout.workers: Ray listens on {cluster.address}, where others could reach it, and "
            f"not on {_HOST}. Give the rollout.ray_address of a cluster that you have closed to "
            "others"
        )
    return replace(cluster, token=token)


def join(cluster: Cluster) -> None:
    """Connects another process of a run to its cluster."""
    os.environ.update(_SETTINGS)
    if cluster.token:
        os.environ.update(_LOCAL | {_TOKEN: cluster.token})
    _connected(cluster.address, cluster.namespace)


def check_reachable(address: str) -> None:
    """Raises ValueError if nobody listens at an address; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"rollout.ray_address={address} cannot be reached: {error}. Give HOST:PORT of the head "
            "of a running Ray cluster, auto for the one of this machine, or null to start one"
        ) from error


def _connected(address: str, namespace: str, **local: Any) -> Cluster:
    import ray

    try:
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

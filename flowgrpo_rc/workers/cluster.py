"""The Ray cluster that a run samples on: one of its own, or one that is running."""

from __future__ import annotations

import logging
import os
import secrets
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from flowgrpo_rc.rollout.engine import EngineError

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tells nobody that it is used
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning about actors without a GPU
}
# Ray listens on the loopback alone only where it believes that no other machine can join. It
# decides that as it is imported. Its own token would lie in the home folder, for every cluster.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
_TOKEN = "RAY_AUTH_TOKEN"
_HOST = "127.0.0.1"


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


def start_or_join(address: str | None, num_cpus: int) -> Cluster:
    """Starts a cluster on this machine, or joins one that is running, with a namespace of its own.

    A cluster that is started has no dashboard, listens on 127.0.0.1 alone, asks for a token of its
    own, and ends with this process.

    Args:
      address: of a running cluster; None to start one.
      num_cpus: cores of a cluster that is started.

    Raises:
      EngineError: Ray would listen on other addresses, or cannot be reached.
    """
    os.environ.update(_SETTINGS)
    namespace = f"flowgrpo_rc_{uuid.uuid4().hex}"
    if address is not None:
        return _connected(address, namespace)
    # Ray reads it once in a process, also for a second run.
    token = os.environ.get(_TOKEN) or secrets.token_hex(32)
    os.environ.update(_LOCAL | {_TOKEN: token})
    cluster = _connected("local", namespace, num_cpus=num_cpus, include_dashboard=False)
    if not cluster.address.startswith(f"{_HOST}:"):
        import ray

        ray.shutdown()
        raise EngineError(
            f"rollout.workers: Ray listens on {cluster.address}, where others could reach it, "
            "since it was imported before the run. Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before "
            "that, or give the rollout.ray_address of a cluster that you have closed to others"
        )
    return replace(cluster, token=token)


def join(cluster: Cluster) -> None:
    """Connects another process of a run to its cluster."""
    os.environ.update(_SETTINGS)
    if cluster.token:
        os.environ.update(_LOCAL | {_TOKEN: cluster.token})
    _connected(cluster.address, cluster.namespace)


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

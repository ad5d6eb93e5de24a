"""The engine's process as the trainer sees it: start, ask, and notice when it crashes or hangs."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from flowgrpo_rc.rollout.devices import visible_device
from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.rollout.vllm_omni.channel import Message, receive, send

# What torchrun, accelerate, MPI and Slurm tell a trainer about its process group, and secrets that
# no engine needs.
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "NODE_RANK")
LAUNCHER_PREFIXES = (
    *(
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHELASTIC_",
        "TORCH_NCCL_",
        "ACCELERATE_",
        "FSDP_",
    ),
    *("OMPI_", "PMI_", "PMIX_", "SLURM_", "WANDB_"),
)
LOG_LINES = 30
POLL_S = 1.0
CLOSE_S = 20.0


def child_environment(
    parent: Mapping[str, str], device: torch.device, tensor_parallel_size: int
) -> dict[str, str]:
    """The engine's environment: no launcher variables, and of the GPUs only the trainer's unless it
    spans several.
    """
    kept = {"VLLM_LOGGING_LEVEL": "WARNING"} | {
        name: value
        for name, value in parent.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    if device.type == "cpu":
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **kept, "VLLM_TARGET_DEVICE": "cpu"}
    if tensor_parallel_size == 1:
        kept["CUDA_VISIBLE_DEVICES"] = visible_device(device)
    return kept


class EngineProcess:
    """A child in a session of its own, so that Ctrl-C reaches the trainer alone, joined by one pair
    of sockets.

    The child ends when its socket does, whatever happened to the trainer. Its output goes to `log`,
    which is removed after an orderly end and stays after a failure.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
    ) -> None:
        """command: takes the number of its socket as a further argument. timeout_s: the longest
        silence.
        """
        self._timeout_s = timeout_s
        self._failed = False
        handle, name = tempfile.mkstemp(prefix="flowgrpo_rc_vllm_omni_", suffix=".log")
        self.log = Path(name)
        ours, theirs = socket.socketpair()
        for direction in (
            socket.SO_SNDTIMEO,
            socket.SO_RCVTIMEO,
        ):  # a child that stops within a message
            ours.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", int(timeout_s) + 1, 0))
        with os.fdopen(handle, "wb") as log, theirs:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(
        self,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[Message]:
        """Send a request and yield its replies, the last of which is `done`.

        Raises EngineError, with the end of the log, if the child reports one, ends, or is silent
        for too long; it is gone then.
        """
        try:
            send(self._connection, kind, fields, tensors or {})
        except OSError as error:
            self.fail(f"did not take the request {kind!r} ({error})")
        while True:
            reply = self._receive(kind, timeout_s or self._timeout_s)
            if reply.kind == "error":
                self.fail(f"failed in {kind!r}: {reply.fields['error']}")
            yield reply
            if reply.kind == "done":
                return

    def close(self) -> None:
        """End the child and wait for it; by force if it takes too long."""
        if self._child.poll() is None:
            try:
                send(self._connection, "close", {}, {})
                self._child.wait(CLOSE_S)
            except (OSError, subprocess.TimeoutExpired):
                self._kill()
        self._connection.close()
        if not self._failed:
            self.log.unlink(missing_ok=True)

    def fail(self, what: str) -> NoReturn:
        """End the child and raise EngineError: the engine `what`, how it ended, and the end of its
        log.
        """
        self._failed = True
        how = _ending(self._kill())
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_LINES:]) or "(empty)"
        raise EngineError(
            f"the vLLM-Omni engine (process {self.pid}) {what}; {how}. The end of its log, "
            f"{self.log}:\n{tail}"
        )

    def _receive(self, kind: str, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(POLL_S):
            if self._child.poll() is not None and not self._connection.poll():
                self.fail(f"ended while it worked on {kind!r}")
            if time.monotonic() > deadline:
                self.fail(f"has not answered {kind!r} for {timeout_s:g} s, the limit of timeout_s")
        try:
            return receive(self._connection)
        except (EOFError, OSError):
            self.fail(f"broke off while it worked on {kind!r}")

    def _kill(self) -> int | None:
        """Its exit status if it ended by itself, else None."""
        try:
            status = self._child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(self.pid, signal.SIGKILL)  # with whatever it started
        except ProcessLookupError:
            return status
        self._child.wait()
        return status


def _ending(status: int | None) -> str:
    if status is None:
        return "it was killed"
    return (
        f"signal {signal.Signals(-status).name} ended it"
        if status < 0
        else f"its exit status is {status}"
    )

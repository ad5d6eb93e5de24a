"""Programs that stand in for the process of a vLLM-Omni engine."""

from __future__ import annotations

import time
from pathlib import Path

# Answers to every request by the code in `answer`, with the request's kind and tensors at hand.
FAKE = """
import json, os, sys, time
from multiprocessing.connection import Connection
from safetensors.torch import load
from flowgrpo_rc.rollout.vllm_omni.channel import fingerprint, receive, send
connection = Connection(int(sys.argv[1]))
count = 0
while True:
    kind, fields, tensors = receive(connection)
    if kind == "close":
        break
    count += kind == "sync"
    held = {"modules": len(tensors) // 2, "fingerprint": fingerprint(tensors)}
    ANSWER
"""
HONEST = 'send(connection, "done", held, {})'


def gone(pid: int, seconds: float = 20) -> bool:
    """Says whether the process has ended, or is a zombie that nobody has waited for yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False

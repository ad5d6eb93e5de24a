"""`flowgrpo-rc serve` in a process of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.remote import Remote

TOKEN = "tok-of-the-server"


def test_the_command_serves_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", TOKEN)
    images = random_images(5)
    prompts = numbered_prompts(5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "import sys; from flowgrpo_rc.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "serve-reward",
        "jpeg",
        "quality=50",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        reward = Remote(
            url=f"http://127.0.0.1:{port}",
            token_env="FLOWGRPO_REWARD_TOKEN",
            max_attempts=1000,
            max_pause_s=0.5,
            deadline_s=300,
        )
        assert reward(images, prompts).values == Jpeg(quality=50)(images, prompts).values
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert TOKEN.encode() not in said

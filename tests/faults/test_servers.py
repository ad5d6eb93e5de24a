"""Clients that mean harm do not keep others from a served reward."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from support.faults import fault, started
from support.launching import free_port
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.cli import main
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.remote import Remote

TOKEN = "tok-of-the-server"
MANY = 300  # more connections than the server has places
# Bytes that a client sends, which then holds its connection.
BEGUN = {
    "silent": b"",
    "wrong token": b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer no\r\nContent-Length: 1000000\r\n\r\n{",
}


@fault("300 clients without the token hold a connection", "an honest one is answered at once")
def test_clients_that_hold_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", TOKEN)
    port = free_port()
    images, prompts = random_images(5), numbered_prompts(5)
    url = f"http://127.0.0.1:{port}"
    with started(lambda: main(["serve-reward", "jpeg", "--port", str(port)])) as process:
        assert process.wait_until(lambda: "Uvicorn running" in process.output())
        for begun in BEGUN.values():
            with ExitStack() as clients:
                for _ in range(MANY):
                    client = socket.create_connection(("127.0.0.1", port))
                    clients.enter_context(client).sendall(begun)
                reward = Remote(
                    url=url, token_env="FLOWGRPO_REWARD_TOKEN", deadline_s=5, max_attempts=1
                )
                assert reward(images, prompts).values == Jpeg()(images, prompts).values

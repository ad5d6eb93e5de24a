"""Clients that mean harm do not keep others from a served reward."""

from __future__ import annotations

import base64
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx2
import pytest
from support.faults import fault, started
from support.launching import free_port
from support.prompts import numbered_prompts, random_images

from flowgrpo_rc.cli import main
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.remote import Remote

TOKEN = "tok-of-the-server"
MANY = 300  # more connections than the server has places
HEADERS = b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that `flowgrpo-rc serve-reward` runs."""
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", TOKEN)
    number = free_port()
    with started(lambda: main(["serve-reward", "jpeg", "--port", str(number)])) as process:
        assert process.wait_until(lambda: "Uvicorn running" in process.output())
        yield number


def silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def slow_headers(port: int) -> socket.socket:
    client = silent(port)
    client.sendall(HEADERS + b"X-Slow: ")
    return client


def slow_body(port: int) -> socket.socket:
    client = silent(port)
    client.sendall(HEADERS + b"Content-Length: 1000000\r\n\r\n{")
    return client


def wrong_token(port: int) -> socket.socket:
    client = silent(port)
    client.sendall(HEADERS + b"Authorization: Bearer no\r\nContent-Length: 1000000\r\n\r\n{")
    return client


@contextmanager
def dripping(clients: list[socket.socket]) -> Iterator[None]:
    """Sends a byte for each client from time to time, and opens none again."""
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.2):
            for client in clients:
                try:
                    client.send(b"a")
                except OSError:  # the server has closed it
                    continue

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_an_honest_client(port: int) -> None:
    url, token = f"http://127.0.0.1:{port}", "FLOWGRPO_REWARD_TOKEN"
    reward = Remote(url=url, token_env=token, deadline_s=5, max_attempts=1)
    images, prompts = random_images(5), numbered_prompts(5)
    assert reward(images, prompts).values == Jpeg()(images, prompts).values


@fault("300 clients without the token hold a connection", "an honest one is answered at once")
@pytest.mark.parametrize("client", [silent, slow_headers, slow_body, wrong_token])
def test_clients_that_hold_connections(port: int, client: Callable[[int], socket.socket]) -> None:
    with ExitStack() as open_clients:
        clients = [open_clients.enter_context(client(port)) for _ in range(MANY)]
        with dripping([] if client is silent else clients):
            for _ in range(3):
                check_an_honest_client(port)


def png(width: int, height: int) -> str:
    """Returns a small file that says it is a picture of this size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(bytes(10**6))), chunk(b"IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


REQUEST = '{{"kind": "image", "samples": [{}], "prompts": [{{"text": "a"}}]}}'
BOMBS = {
    "nesting": "[" * 10**6,
    "number": REQUEST.format("1" * 10**5),
    "width": REQUEST.format(f'"{png(10**6, 10**6)}"'),
    "pixels": REQUEST.format(f'"{png(9000, 9000)}"'),
    "cut": REQUEST.format(f'"{png(4000, 4000)}"'),
    "infinity": '{"kind": "text", "samples": ["a"], "prompts": [{"text": "a", "index": 1e999}]}',
    "pickle": '{"kind": "pickle", "samples": ["gASVIQAAAAAAAACM"], "prompts": [{}]}',
}


@fault("a client with the token sends what cannot be read", "422 says why, and others are served")
def test_bombs_of_a_client(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1/score"
    for name, content in BOMBS.items():
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        answer = httpx2.post(url, content=content, headers=headers, timeout=10)
        assert answer.status_code == 422, (name, answer.text)
    check_an_honest_client(port)

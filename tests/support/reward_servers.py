"""Local servers that answer the requests of a reward."""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.rewards.http.wire import decode_png


@dataclass
class Received:
    path: str
    head: str
    body: Any


Behaviour = Callable[[socket.socket, Received, "Scripted"], None]


class Scripted(socketserver.ThreadingTCPServer):
    """A server that reads requests and lets `behaviour` write anything, until `stopped`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a client may connect often at once; the default of 5 drops some

    def __init__(self, behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.behaviour = behaviour
        self.stopped = threading.Event()
        self.received = list[Received]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that go away; these servers are for that."""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        read = self.request.makefile("rb")
        first = read.readline().decode()
        head, length = first, 0
        while line := read.readline().decode("latin-1").strip():
            head += f"{line}\n"
            if line.lower().startswith("content-length"):
                length = int(line.split(":")[1])
        received = Received(first.split(" ")[1], head, json.loads(read.read(length) or b"null"))
        self.server.received.append(received)
        with suppress(OSError):
            self.server.behaviour(self.request, received, self.server)


@contextmanager
def scripted(behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    with Scripted(behaviour, tls) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join()


def http(
    content: bytes | str | object,
    status: str = "200 OK",
    kind: str = "application/json",
    headers: str = "",
) -> bytes:
    """Returns a whole answer; anything but bytes and text is written as JSON."""
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    body = content.encode() if isinstance(content, str) else content
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n{headers}\r\n".encode() + body


def chat(text: str | None, **further: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, **further}]}


def shown(received: Received) -> list[int]:
    """Returns the first byte of every picture that a question shows."""
    content = received.body["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [int(decode_png(url.partition(",")[2])[0, 0, 0]) for url in urls]


def answering(answer: Callable[[Received], object]) -> Behaviour:
    return lambda connection, received, server: connection.sendall(http(answer(received)))

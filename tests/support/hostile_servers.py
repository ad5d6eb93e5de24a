"""Reward servers that hang, flood, lie or repeat the token."""

from __future__ import annotations

import gzip
import os
import pickle
import socket

from support.reward_servers import Received, Scripted, http

from flowgrpo_rc.rewards.http.wire import decode
from flowgrpo_rc.rewards.jpeg import Jpeg

TOKEN = "tok-1f2e3d4c5b6a"
ENDLESS = 10**10


def jpeg(received: Received) -> dict[str, object]:
    samples, prompts = decode(received.body)
    return {"values": list(Jpeg()(samples, prompts).values)}


def hangs(connection: socket.socket, received: Received, server: Scripted) -> None:
    server.stopped.wait(60)


def drips(head: bytes):
    def behaviour(connection: socket.socket, received: Received, server: Scripted) -> None:
        connection.sendall(head)
        while not server.stopped.wait(0.02):
            connection.sendall(b"a")

    return behaviour


def floods(head: str, part: bytes):
    def behaviour(connection: socket.socket, received: Received, server: Scripted) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{head}".encode())
        server.flooded = 0
        while server.flooded < ENDLESS and not server.stopped.is_set():
            server.flooded += connection.send(part)

    return behaviour


def says(answer: bytes):
    return lambda connection, received, server: connection.sendall(answer)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch unpickled",)


def values(*numbers: object) -> bytes:
    return http({"values": numbers})


START, END = TOKEN[:5].encode(), TOKEN[5:].encode()
ECHO = f"Bearer {TOKEN}"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in ECHO)
HOSTILE = {
    "hangs": hangs,
    "drips its header": drips(b"HTTP/1.1 200 OK\r\nX-A: "),
    "drips its body": drips(http("")[:-6] + b"9\r\n\r\n"),
    "floods by length": floods(f"Content-Length: {ENDLESS}\r\n\r\n", b" " * 2**16),
    "floods in chunks": floods(
        "Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 2**16 + b"\r\n"
    ),
    "floods its header": floods("X-A: ", b" " * 2**16),
    "hangs up": says(b""),
    "hangs up in the body": says(http({"values": [1, 2, 3]})[:-4]),
    "is no HTTP server": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "is busy": says(http({}, "429 Too Many Requests")),
    "is busy for long": says(http({}, "429 Too Many Requests", headers="Retry-After: 86400\r\n")),
    "fails": says(http({"detail": "out of memory"}, "500 Internal Server Error")),
    "is unavailable": says(http({}, "503 Service Unavailable")),
    "refuses": says(http({"detail": "no such reward"}, "404 Not Found")),
    "answers HTML": says(http("<html>1</html>", kind="text/html")),
    "redirects": says(
        http("", "307 Temporary Redirect", headers="Location: http://127.0.0.1:1/\r\n")
    ),
    "answers broken JSON": says(http('{"values": [1, 2')),
    "answers deep JSON": says(http("[" * 200_000)),
    "answers a long number": says(http('{"values": [' + "9" * 10_000 + ", 1, 1]}")),
    "answers an overflow": says(http('{"values": [' + "9" * 400 + ", 1, 1]}")),
    "answers too few": says(values(1, 2)),
    "answers too many": says(values(1, 2, 3, 4)),
    "answers text": says(values("1", "2", "3")),
    "answers truth": says(values(True, True, True)),
    "answers something else": says(http([1, 2, 3])),
    "answers nothing": says(http("")),
    "sends a pickle": says(http(pickle.dumps(Bomb()), kind="application/octet-stream")),
    "sends a pickle as JSON": says(http(pickle.dumps(Bomb()))),
    "compresses": says(http(gzip.compress(b"1" * 10**7), headers="Content-Encoding: gzip\r\n")),
    "echoes the token": says(
        http({"detail": ECHO}, "400 Bad Request", headers=f"X-Echo: {ECHO}\r\n")
    ),
    "echoes the token in pieces": says(http(START + b"\0" + END + b"\xff", "400 Bad Request")),
    "echoes the token around a broken byte": says(http(START + b"\xff" + END, "400 Bad Request")),
    "echoes the token in escapes": says(http(f'{{"detail": "{ESCAPED}"}}', "400 Bad Request")),
    "echoes the token as status": says(f"HTTP/1.1 {ECHO}\r\n\r\n".encode()),
    "echoes the token as a value": says(values(ECHO, ECHO, ECHO)),
    "echoes the token as a key": says(http({ECHO: [1, 2, 3]})),
}

"""Why a file of a model on the Hub cannot be had: network, licence, name or the file itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowgrpo_rc import reading
from flowgrpo_rc.models.index import model_file
from flowgrpo_rc.reading import check_on_hub

NAME = "model_index.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
Asked = list[tuple[str, str]]


@contextmanager
def hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path, status: int, code: str, asked: Asked | None = None
) -> Iterator[str]:
    """A Hub that answers everything with one status and one code of an error.

    `asked` gets the method and the path of each request.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Logs nothing."""

        def do_HEAD(self) -> None:
            if asked is not None:
                asked.append((self.command, self.path))
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "accept the licence of this model"),
        (404, "RepoNotFound", "no such repository to you"),
        (404, "EntryNotFound", "has no model_index.json"),
        (400, "", "refuses model_index.json"),
    ],
)
def test_the_hub_refuses(tmp_path, monkeypatch, status, code, message):
    words = rf"^model\.path=a/b: .*{message}"
    with hub(monkeypatch, tmp_path, status, code), pytest.raises(ValueError, match=words):
        model_file("a/b", NAME)


def test_the_network_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, tmp_path, 200, "") as address:
        pass  # nobody listens there any more
    with pytest.raises(ValueError, match=rf"{address} cannot be reached.*hf download a/b"):
        model_file("a/b", NAME)


def test_a_hub_that_never_answers_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def keep_silent(listener: socket.socket) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                asked.append(listener.accept())

    with hub(monkeypatch, tmp_path, 200, ""), socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        template = address + "/{repo_id}/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(reading, "ANSWER_S", 0.1)
        threading.Thread(target=keep_silent, args=(listener,), daemon=True).start()
        with pytest.raises(ValueError, match=r"cannot be reached \(.*timed out\).*hf download a/b"):
            model_file("a/b", NAME)
    ((connection, _),) = asked
    connection.close()


def test_a_local_folder_is_asked_first(tmp_path: Path) -> None:
    assert model_file(str(tmp_path), NAME) == tmp_path / NAME
    words = r"^model\.path=a/b/c: there is no such folder, and Repo id"
    with pytest.raises(ValueError, match=words):
        model_file("a/b/c", NAME)


def test_what_is_large_is_asked_for_by_head_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Asked = []
    with hub(monkeypatch, tmp_path, 200, "", asked):
        check_on_hub("a/b", WEIGHTS, key="path")
    assert asked == [("HEAD", "/a/b/main/model.safetensors")]
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
    asked.clear()  # weights in parts are weights
    words = "path=a/b: this repository of the Hub has no model.safetensors and no model.safet"
    server = hub(monkeypatch, tmp_path, 404, "EntryNotFound", asked)
    with server, pytest.raises(ValueError, match=words):
        check_on_hub("a/b", WEIGHTS, key="path")
    assert [path for _, path in asked] == [f"/a/b/main/{name}" for name in WEIGHTS]

"""A local Hub that takes uploads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "secretsecretsecret"


class Hub(ThreadingHTTPServer):
    """A local Hub that accepts the token TOKEN.

    `visible` is the visibility of the repository me/lora, None if there is none.
    """

    visible: str | None = None
    posted: list[tuple[str, str]]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        visible = self.server.visible
        if self.path.startswith("/api/whoami"):
            accepted = self.headers["Authorization"] == f"Bearer {TOKEN}"
            self._answer(200 if accepted else 401, {"name": "me", "type": "user", "orgs": []})
        elif visible is None:
            self._answer(404, {"error": "Repository not found"}, "RepoNotFound")
        else:
            self._answer(200, {"id": "me/lora", "private": visible == "private", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.posted.append((self.path, body))
        url = f"{self.server.address}/me/lora"
        if "/preupload/" in self.path:
            asked = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(200, {"files": [{"path": path, **mode} for path in asked]})
        elif "/commit/" in self.path:
            commit = {"commitOid": "0" * 40, "commitUrl": f"{url}/commit/0", "pullRequestUrl": None}
            self._answer(200, commit)
        else:
            self._answer(200, {"url": url, "id": "me/lora", "warnings": [], "errors": []})

    def _answer(self, status: int, content: Any, error: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def local_hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Handler) as server:
        server.posted = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()

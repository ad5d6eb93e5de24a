"""`flowgrpo-rc watch`: the report of a run in a browser of this machine, while the run goes on."""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.report.run import report_page

# What the page shows; the time of a folder is that of its newest entry.
_SHOWN = "config.yaml environment.json metrics.jsonl health.jsonl rejected.jsonl rejected samples"
_SHOWN += " suites checkpoints lora"
_INLINE = re.compile(r'src="data:image/png;base64,([^"]*)"')


def main(arguments: argparse.Namespace) -> int:
    """Serves the report of a run until it is interrupted."""
    run_dir = Path(arguments.run_dir)
    if not any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ValueError(f"{run_dir} is not the folder of a run, or the run has not begun")
    try:
        server = ReportServer(run_dir, arguments.port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {arguments.port}: {error}; 0 takes a free one") from error
    with server:
        address = f"http://127.0.0.1:{server.server_port}"
        print(f"{run_dir}: {address} shows its report, on this machine; Ctrl-C ends", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return EXIT_OK


class ReportServer(ThreadingHTTPServer):
    """Serves the page of one run and its pictures, and nothing else, to this machine alone."""

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._tag = ""
        self._page = b""
        self._pictures: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}  # those of the page before, which may still be loading

    def page(self) -> tuple[str, bytes]:
        """Returns the page as the folder is now, and a tag that changes with it.

        Raises ValueError if the folder has no metrics yet, or is damaged.
        """
        with self._lock:
            tag = self._state()
            if tag != self._tag:
                pictures: dict[str, bytes] = {}
                page = report_page(self._run_dir, live=True)
                self._page = _INLINE.sub(partial(_linked, pictures), page).encode()
                self._tag, self._pictures, self._older = tag, pictures, self._pictures
            return self._tag, self._page

    def picture(self, path: str) -> bytes | None:
        """Returns a picture of the page by its path."""
        return self._pictures.get(path) or self._older.get(path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a browser that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _state(self) -> str:
        paths = [self._run_dir / name for name in _SHOWN.split()]
        stats = [(path.name, path.stat()) for path in paths if path.exists()]
        state = [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
        return f'"{hashlib.sha256(repr(state).encode()).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "flowgrpo-rc"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not _is_here(self.headers.get("Host", "")):
            # A page of somebody else's, whose name leads here, may not read the report.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"not the name of this machine")
        elif path == "/":
            self._page()
        elif (picture := self.server.picture(path)) is not None:
            self._answer(HTTPStatus.OK, "image/png", picture, "max-age=31536000, immutable")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"only the report is here")

    def _page(self) -> None:
        try:
            tag, page = self.server.page()
        except (OSError, ValueError) as error:
            self.close_connection = True
            text = f"nothing to show yet: {error}".encode()
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text, Refresh="3")
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, "text/html", b"", ETag=tag)
        return self._answer(HTTPStatus.OK, "text/html", page, ETag=tag)

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""

    def _answer(
        self, status: HTTPStatus, kind: str, body: bytes, cache: str = "no-cache", **further: str
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
            "Content-Length": str(len(body)),
            "Cache-Control": cache,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in (headers | further).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _linked(pictures: dict[str, bytes], found: re.Match[str]) -> str:
    """Puts a picture of the page among those to serve, and returns its address."""
    png = base64.b64decode(found[1])
    path = f"/pictures/{hashlib.sha256(png).hexdigest()}.png"
    pictures[path] = png
    return f'src="{path}"'


def _is_here(host: str) -> bool:
    """Returns whether a Host header names this machine, at whatever port a tunnel gave it."""
    try:
        return urlsplit(f"//{host}").hostname in ("127.0.0.1", "localhost", "::1")
    except ValueError:
        return False

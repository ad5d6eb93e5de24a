"""`flowgrpo-rc watch`: the report of a run in a browser of this machine, while the run goes on."""

import argparse
import base64
import hashlib
import re
import struct
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.report.run import report_page

# What the page shows; the time of a folder is that of its newest entry.
_SHOWN = "config.yaml environment.json metrics.jsonl health.jsonl rejected.jsonl samples"
_SHOWN += " suites checkpoints lora"
_FIRST = {"prompts", ".lock"}  # what a run writes before that
_INLINE = re.compile(r'src="data:image/png;base64,([^"]*)"')
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def main(arguments: argparse.Namespace) -> int:
    """Serves the report of a run until it is interrupted."""
    run_dir = Path(arguments.run_dir)
    begun = any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if run_dir.is_file() or not (begun or {file.name for file in run_dir.glob("*")} <= _FIRST):
        raise ValueError(f"{run_dir} is not the folder of a run")
    try:
        server = ReportServer(run_dir, arguments.port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {arguments.port}: {error}; 0 takes a free one") from error
    with server:
        address = f"http://127.0.0.1:{server.server_port}"
        waits = "" if begun else "; no run is there yet, so it waits for one"
        print(f"{run_dir}: {address} shows its report here; Ctrl-C ends{waits}", flush=True)
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
        self.pictures: dict[str, bytes] = {}  # of the page, by path

    def page(self) -> tuple[str, bytes]:
        """Returns a tag of the files, and the page that they make; ValueError without metrics."""
        with self._lock:
            paths = [self._run_dir / name for name in _SHOWN.split()]
            stats = [(path, path.stat()) for path in paths if path.exists()]
            state = repr([(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats])
            tag = f'"{hashlib.sha256(state.encode()).hexdigest()}"'
            if tag != self._tag:
                pictures: dict[str, bytes] = {}
                page = report_page(self._run_dir, live=True)
                self._page = _INLINE.sub(partial(_linked, pictures), page).encode()
                self._tag = tag
                self.pictures = pictures
            return tag, self._page

    def handle_error(self, request: Any, client_address: object) -> None:
        """Says nothing of a browser that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "flowgrpo-rc"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        if not _is_here(self.headers.get("Host", "")):
            # A page of somebody else's, whose name leads here, may not read the report.
            self._answer(403, "text/plain", b"not the name of this machine")
        elif self.path == "/":
            self._answer_page()
        elif (picture := self.server.pictures.get(self.path)) is not None:
            self._answer(200, "image/png", picture, Cache_Control="max-age=31536000, immutable")
        else:
            self._answer(404, "text/plain", b"only the report is here")

    def _answer_page(self) -> None:
        try:
            tag, page = self.server.page()
        except (OSError, ValueError) as error:
            text = f"nothing to show yet: {error}".encode()
            return self._answer(503, "text/plain; charset=utf-8", text, Refresh="3")
        known = self.headers.get("If-None-Match") == tag
        kind = "text/html; charset=utf-8"
        return self._answer(304 if known else 200, kind, b"" if known else page, ETag=tag)

    def _answer(self, status: int, kind: str, body: bytes, **further: str) -> None:
        self.send_response(status)
        about = {"Content_Type": kind, "Content_Length": str(len(body))}
        for name, value in (_HEADERS | about | further).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def _linked(pictures: dict[str, bytes], match: re.Match[str]) -> str:
    """Puts a picture of the page among those to serve; returns its address and size."""
    png = base64.b64decode(match[1])
    path = f"/pictures/{hashlib.sha256(png).hexdigest()}.png"
    pictures[path] = png
    # With its size, what is below does not move while it loads.
    width, height = struct.unpack(">II", png[16:24].ljust(8, b"\0"))
    return f'src="{path}" width="{width}" height="{height}"'


def _is_here(host: str) -> bool:
    """Returns whether a Host header names this machine, at whatever port a tunnel gave it."""
    try:
        return urlsplit(f"//{host}").hostname in ("127.0.0.1", "localhost", "::1")
    except ValueError:
        return False

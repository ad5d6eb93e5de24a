"""A headless Chromium that tests drive by its DevTools protocol, over pipes, without a library."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--remote-debugging-pipe", "about:blank"),
)
# The browser reads commands from 3 and writes answers to 4. Both pipes go to high numbers first,
# because they may have each other's.
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number)
    os.close(pipe)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 120.0  # seconds for an answer; other programs may use the cores


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab.

    Attributes:
      events: everything that the tab reported: console messages, errors, requests.
    """

    def __init__(self, out: int, back: int) -> None:
        self._out = out
        self._back = back
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._back, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """Opens a file or an address in a window of this width and waits until it is loaded."""
        address = page if isinstance(page, str) else page.as_uri()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        self.dark(dark)
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState + location.href", "complete" + address)

    def wait_for(self, expression: str, wanted: Any) -> None:
        """Waits until a JavaScript expression has a value."""
        until = time.monotonic() + _PATIENCE
        while (found := self.eval(expression)) != wanted:
            assert time.monotonic() < until, f"{expression} stays {found!r}"
            time.sleep(0.05)

    def dark(self, dark: bool) -> None:
        """Sets what the reader's system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def eval(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page, after two frames."""
        frames = "await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        code = f"(async () => {{ {frames}; return {expression}; }})()"
        found = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Sends a mouse event: mouseMoved, mousePressed or mouseReleased."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def complaints(self, own: str = "file:") -> list[str]:
        """Returns console messages, errors, and requests that are neither the page's nor data."""
        found = []
        for event in self.events:
            method = event.get("method")
            params = event.get("params", {})
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(params))
            if method == "Network.requestWillBeSent":
                address = params["request"]["url"]
                if not address.startswith(("data:", own)):
                    found.append(address)
        return found


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile, and ends it."""
    from_us, out = os.pipe()
    back, to_us = os.pipe()
    starter = [sys.executable, "-c", _START, str(from_us), str(to_us)]
    command = [*starter, program, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Browser(out, back)
    finally:
        process.terminate()
        process.wait(30)
        os.close(out)
        os.close(back)

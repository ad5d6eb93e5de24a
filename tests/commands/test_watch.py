"""`flowgrpo-rc watch`: what it serves, to whom, and the page in a browser while a run goes on."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.browser import browser, find_browser
from support.report_pages import make_run

from flowgrpo_rc.cli import main
from flowgrpo_rc.commands.watch import ReportServer
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.samples import save_grid

OUTCOME = "document.querySelector('.outcome').innerText"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    run = make_run(tmp_path / "run")
    with ReportServer(run, 0) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def run_of(server: ReportServer) -> Path:
    return server._run_dir


def ask(
    server: ReportServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def evaluate(run: Path, step: int, reward: float) -> None:
    """Adds an evaluation, as a run does."""
    images = np.full((8, 32, 64, 3), step, dtype=np.uint8)
    captions = [f'"w{i}" {reward:.2f}' for i in range(8)]
    save_grid(run / "samples" / f"step_{step:06d}.png", images, captions)
    MetricsFile(run / "metrics.jsonl").append(step, {"reward/mean": 0.5, "val/reward": reward})


def test_the_page_and_its_pictures_are_served_and_nothing_else(server: ReportServer) -> None:
    run = run_of(server)
    (run / "private.png").write_bytes(b"private")
    status, headers, page = ask(server)
    assert (status, headers["X-Frame-Options"]) == (200, "DENY")
    assert b"data:image" not in page.split(b"<section", 1)[1]
    assert b"hunter" not in page
    pictures = re.findall(rb'src="(/pictures/\w+\.png)"', page)
    assert len(pictures) > 16
    for picture in pictures:
        status, headers, png = ask(server, picture.decode())
        assert (status, headers["Content-Type"], png[:4]) == (200, "image/png", b"\x89PNG")
    there = ("metrics.jsonl", "config.yaml", "samples/", "samples/step_000000.png", "private.png")
    for path in (*there, "pictures/", "../run/config.yaml", "%2e%2e/run/config.yaml"):
        assert ask(server, f"/{path}")[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, method=method)[0] == 501
    assert server.server_address[0] == "127.0.0.1"


HOSTS = {
    "127.0.0.1:8100": 200,
    "localhost:9000": 200,  # through a tunnel
    "[::1]:8100": 200,
    "evil.example:8100": 403,
    "127.0.0.1.evil.example": 403,
    "localhost@evil.example": 403,
    "[": 403,
    "": 403,
}


def test_only_this_machines_names_are_answered(server: ReportServer) -> None:
    for host, status in HOSTS.items():
        answered, _, body = ask(server, Host=host)
        assert (host, answered) == (host, status)
        assert (b"Held-out reward" in body) == (status == 200)


def test_a_page_is_sent_again_only_when_the_run_has_changed(server: ReportServer) -> None:
    tag = ask(server)[1]["ETag"]
    assert ask(server, If_None_Match=tag)[::2] == (304, b"")
    evaluate(run_of(server), 61, 0.9)
    status, headers, page = ask(server, If_None_Match=tag)
    assert (status, headers["ETag"] != tag) == (200, True)
    assert b"\xe2\x86\x92 0.9000" in page


def test_what_cannot_be_watched_is_refused(
    server: ReportServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, Path(__file__)):
        assert main(["watch", str(place)]) == 2
        assert f"{place} is not the folder of a run" in capsys.readouterr().err
    for port in (server.server_port, 70000):
        assert main(["watch", str(run_of(server)), "--port", str(port)]) == 2
        assert f"--port {port}: " in capsys.readouterr().err


def test_the_command_waits_for_a_run_and_serves_until_it_is_interrupted(
    server: ReportServer, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    # A shell that runs tests in the background has them ignore this signal.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "flowgrpo_rc", "watch"]
    command += [str(later), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = r"http://127\.0\.0\.1:(\d+) .*; no run is there yet, so it waits for one$"
        found = re.search(said, process.stdout.readline())
        assert found is not None
        watched: Any = SimpleNamespace(server_port=int(found[1]))
        status, headers, body = ask(watched)
        assert (status, headers["Refresh"]) == (503, "3")
        assert b"nothing to show yet" in body
        run_of(server).rename(later)
        assert ask(watched)[0] == 200
        process.send_signal(2)
        assert process.wait(60) == 0


def test_an_open_page_follows_the_run(server: ReportServer, tmp_path: Path) -> None:
    """New numbers and pictures come in; place, zoom, hidden lines and what is unfolded stay."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: the page was not opened in a browser")
    run, address = run_of(server), f"http://127.0.0.1:{server.server_port}/"
    place = "Math.round(document.querySelector('#update').getBoundingClientRect().top) + 0"
    newest = "document.querySelector('#reward .legend').innerText.split('\\n')[0]"
    line = "document.querySelectorAll('#reward .legend button')[1]"
    pressed = f"{line}.getAttribute('aria-pressed')"
    unfolded = "document.querySelector('#config details').open"
    with browser(program, tmp_path / "profile") as tab:
        tab.open(address, width=400, dark=True)
        tab.wait_for("document.querySelector('.live').innerText.split(';')[0]", "live")
        tab.eval(f"{line}.click()")
        tab.eval("document.querySelector('#config summary').click()")
        tab.eval("document.querySelector('#update').scrollIntoView()")
        assert tab.eval(newest) == "step 60"
        at = tab.eval(place)
        evaluate(run, 61, 0.9)
        tab.wait_for(f"{OUTCOME}.includes('0.9000')", True)
        assert tab.eval(newest) == "step 61"
        assert tab.eval("document.querySelector('#samples').innerText.includes('Step 61')")
        assert tab.eval("[...document.images].every(i => i.complete && i.naturalWidth)")
        assert abs(tab.eval(place) - at) <= 1
        assert tab.eval("scrollY") > 1000
        assert (tab.eval(pressed), tab.eval(unfolded)) == ("false", True)
        assert tab.eval("document.documentElement.scrollWidth") == 400
        assert tab.eval("document.querySelectorAll('.plot:not(:has(canvas))').length") == 0
        assert tab.complaints(address) == []
        (run / "metrics.jsonl").rename(run / "away")
        tab.wait_for("document.querySelector('.live').className", "live lost")
        assert "it has no metrics.jsonl" in tab.eval("document.querySelector('.live').innerText")
        (run / "away").rename(run / "metrics.jsonl")
        evaluate(run, 62, 0.95)
        tab.wait_for(f"{OUTCOME}.includes('0.9500')", True)
        tab.wait_for("document.querySelector('.live').className", "live")

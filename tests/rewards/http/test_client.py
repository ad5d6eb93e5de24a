"""Servers that refuse, hang, flood or lie: a reward fails in time and writes no token."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import datetime
from decimal import Decimal
from email.utils import formatdate
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support.hostile_servers import HOSTILE, TOKEN, jpeg, says
from support.reward_servers import Received, Scripted, answering, chat, http, scripted, shown

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.http import client as http_client
from flowgrpo_rc.rewards.http.client import JsonClient
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.manager import RewardConfig, RewardManager, build_terms
from flowgrpo_rc.rewards.remote import Remote
from flowgrpo_rc.rewards.vlm_ocr import VlmOCR

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 12, 3), dtype=np.uint8)
PROMPTS = [Prompt(text=f"prompt {index}", index=index) for index in range(3)]
QUICK = {"deadline_s": 1.0, "max_pause_s": 0.02, "max_response_mb": 0.5}
PATIENT = {**QUICK, "deadline_s": 60.0}
SENT_AGAIN = {"is busy": 4, "is unavailable": 4}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_server_fails_its_own_samples_in_little_time(what, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    with scripted(HOSTILE[what]) as server:
        limits = PATIENT if what in SENT_AGAIN else QUICK
        remote = {"url": server.url, "token_env": "REWARD_TOKEN", **limits}
        rewards = RewardManager(RewardConfig(terms={"remote": remote, "jpeg": {}}))
        start = time.monotonic()
        scored = rewards.collect([rewards.submit(IMAGES, PROMPTS)])
        seconds = time.monotonic() - start
        rewards.close()
    assert seconds < 20
    assert scored.parts["remote"].isnan().all()
    assert not scored.valid.any()
    assert scored.parts["jpeg"].tolist() == Jpeg()(IMAGES, PROMPTS).values
    assert len(server.received) == SENT_AGAIN.get(what, 1)
    assert all(
        f"authorization: bearer {TOKEN}" in received.head.lower() for received in server.received
    )
    assert TOKEN not in caplog.text + rewards.last_error["remote"]
    assert list(tmp_path.iterdir()) == []
    if what.startswith("floods"):
        assert server.flooded < 50e6


def test_a_refused_connection_is_tried_again_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (answer,) = JsonClient(url=f"http://127.0.0.1:{port}", **PATIENT).post_all("/", [{}])
    assert "reached (ConnectError: All connection attempts fail" in str(answer)
    assert "start the server first" in str(answer)


def test_a_name_lookup_without_end_does_not_hold_a_call(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(120))
    start = time.monotonic()
    (answer,) = JsonClient(url="https://example.org", deadline_s=0.5).post_all("/", [{}])
    assert "no answer within deadline_s=0.5" in str(answer)
    assert time.monotonic() - start < 60
    done.set()


def test_a_redirect_is_not_followed():
    with scripted(answering(jpeg)) as other:
        aside = http("", "302 Found", headers=f"Location: {other.url}/v1/score\r\n")
        with scripted(says(aside)) as server:
            (answer,) = JsonClient(url=server.url, **QUICK).post_all("/v1/score", [{}])
    assert "answered 302" in str(answer)
    assert other.received == []


@pytest.mark.parametrize(
    ("status", "pause", "least"),
    [
        ("429 Too Many Requests", "1", 1),
        ("502 Bad Gateway", "0.2", 0.2),
        ("503 X", "soon", 0),
        ("504 X", "", 0),
    ],
)
def test_a_busy_server_is_asked_again_after_the_pause_that_it_asks_for(status, pause, least):
    numbers = count()

    def busy_twice(connection: socket.socket, received: Received, server: Scripted) -> None:
        busy = http({}, status, headers=f"Retry-After: {pause}\r\n")
        connection.sendall(busy if next(numbers) < 2 else http({"a": 1}))

    start = time.monotonic()
    with scripted(busy_twice) as server:
        assert JsonClient(url=server.url, **PATIENT).post_each("/", [{}]) == [{"a": 1}]
    assert time.monotonic() - start > 2 * least
    assert len(server.received) == 3


def test_a_pause_may_be_a_date() -> None:
    now = int(time.time())
    assert 58 < http_client._seconds_until(formatdate(now + 60, usegmt=True)) <= 60
    assert http_client._seconds_until(formatdate(now - 60, usegmt=True)) == 0


FORM = r"must begin with https://.* a port up to 65535 .* no user, query or fragment"
NO_TOKEN = r"name of an environment variable, not a token: .* is unset, or holds no token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://example.org"}, r"in the clear: use https"),
        ({"url": "http://0.0.0.0:8000"}, r"in the clear"),
        ({"url": "http://127.0.0.1.example.org"}, r"in the clear"),
        ({"url": "ftp://127.0.0.1"}, FORM),
        ({"url": "http://me:secret@127.0.0.1"}, FORM),
        ({"url": "https://example.org/?token=secret"}, FORM),
        ({"url": "http://localhost:port"}, FORM),
        ({"url": "http://localhost:70000"}, FORM),
        ({"url": 8000}, r"reward\.terms\.remote: "),
        ({"token_env": "tok-secret"}, NO_TOKEN),
        ({"token_env": "secret0f1e2d3c"}, NO_TOKEN),
        ({"token_env": "BROKEN"}, NO_TOKEN),
        ({"ca_file": "nowhere.pem"}, r"ca_file='nowhere\.pem': give a file of certificates in PEM"),
        ({"part_names": "edit"}, r"part_names='edit': give a list, such as \[edit\]"),
        ({"deadline_s": 0}, r"deadline_s=0: give a number of at least 0\.001"),
        ({"max_response_mb": float("inf")}, r"max_response_mb=inf"),
        ({"max_attempts": 0}, r"max_attempts=0: give a whole number of at least 1"),
        ({"deadline": 3}, r"connection\.deadline: unknown option \(did you mean 'deadline_s'\?\)"),
        ({"batch_size": 2.5}, r"batch_size=2\.5: give a whole number of at least 1"),
    ],
)
def test_bad_options(options, message, monkeypatch):
    monkeypatch.setenv("BROKEN", 'one\n"two')
    term = {"url": "http://localhost:8000", **options}
    with pytest.raises(ValueError, match=message) as caught:
        build_terms(RewardConfig(terms={"remote": term}))
    assert "secret" not in str(caught.value)


def test_addresses_that_are_safe():
    for url in ("http://127.0.0.1:1", "http://[::1]:1/path", "https://example.org/rewards"):
        JsonClient(url=url)


def test_one_unanswered_image_does_not_fail_the_others():
    """A vision-language model writes two lines, fails for one image, talks about another, and
    then answers nothing.
    """
    answers = {int(IMAGES[index, 0, 0, 0]): index for index in range(3)}

    def reads(connection: socket.socket, received: Received, server: Scripted) -> None:
        text = ["A\nB", None, "xx A B!"][answers[shown(received)[0]]]
        assert received.body["messages"][0]["content"][1]["text"]
        connection.sendall(http(chat(text)))

    prompts = [Prompt(text="x", index=index, target="ab") for index in range(3)]
    with scripted(reads) as server:
        reward = VlmOCR(url=f"{server.url}/v1", model="reader", **PATIENT)
        scores = reward(IMAGES, prompts)
        assert np.isnan(reward(IMAGES[1:2], prompts[1:2]).values).all()
    assert np.array_equal(scores.values, [1.0, np.nan, 1.0], equal_nan=True)
    assert np.array_equal(scores.parts["exact"], [1.0, np.nan, 0.0], equal_nan=True)
    assert scores.failure == "1 of 3 images have no answer: the answer is no chat completion"
    assert {(received.path, received.body["model"]) for received in server.received} == {
        ("/v1/chat/completions", "reader")
    }


def test_a_token_that_the_server_refuses() -> None:
    for status in ("401 Unauthorized", "403 Forbidden"):
        with scripted(says(http({}, status))) as server:
            (answer,) = JsonClient(url=server.url, **QUICK).post_all("/", [{}])
        assert f"answered {status[:3]}: token_env must name" in str(answer)


@pytest.mark.parametrize("value", [datetime(2026, 1, 2), Decimal("0.5"), b"a", float("nan")])
def test_metadata_that_json_cannot_hold_is_refused_before_a_run(value: object) -> None:
    remote = Remote(url="http://127.0.0.1:1")
    remote.check_prompt(Prompt(text="x", index=0, metadata={"a": [1, {"b": None}]}))
    with pytest.raises(ValueError, match=r"metadata cannot be sent as JSON: .*: drop that"):
        remote.check_prompt(Prompt(text="x", index=0, metadata={"a": [value]}))

"""A served reward refuses bad requests, and its client gets the scores of the reward itself."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn
from PIL import Image
from support.reward_servers import Received, Scripted, scripted

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.cli import main
from flowgrpo_rc.rewards.base import Reward, Scores
from flowgrpo_rc.rewards.exact_match import ExactMatch
from flowgrpo_rc.rewards.http import server
from flowgrpo_rc.rewards.http.client import ServerError
from flowgrpo_rc.rewards.http.server import Door, limits, make_app
from flowgrpo_rc.rewards.http.wire import decode, encode, encode_png
from flowgrpo_rc.rewards.jpeg import Jpeg
from flowgrpo_rc.rewards.remote import Remote

TOKEN = "tok-of-the-server"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 9, 14, 3), dtype=np.uint8)
PROMPTS = [
    Prompt(text=f'"{i}"', index=i, target=str(i), metadata={"include": [{"class": "dog"}]})
    for i in range(5)
]


class Video(Reward):
    """Returns the first pixel of each frame; fails for the image with index 3."""

    kind = "video"
    part_names = ("last",)

    def __call__(self, samples, prompts):
        if any(prompt.index == 3 for prompt in prompts):
            raise RuntimeError("broken on purpose")
        first = samples[:, :, 0, 0, 0].astype(float)
        columns = {"last": first[:, -1].tolist(), "more": first[:, 0]}
        return Scores(values=[None, *first[1:, 0]], parts=columns)


@contextmanager
def served(reward: Reward, *, max_body_mb: float = 1.0, **options: Any) -> Iterator[str]:
    app = make_app(reward, TOKEN, max_body_mb=max_body_mb)
    settings = {"port": 0, "log_level": "critical", "lifespan": "off", **limits(Door()), **options}
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGRPO_REWARD_TOKEN", TOKEN)


def remote(url: str, **options: Any) -> Remote:
    return Remote(url=url, token_env="FLOWGRPO_REWARD_TOKEN", **options)


@pytest.fixture(scope="module")
def jpegs() -> Iterator[str]:
    with served(Jpeg()) as url:
        yield url


def test_images_come_back_with_the_scores_of_the_reward_itself(jpegs):
    scores = remote(jpegs, batch_size=2, concurrency=2)(IMAGES, PROMPTS)
    assert scores.values == Jpeg()(IMAGES, PROMPTS).values


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate by openssl")
    folder = tmp_path_factory.mktemp("tls")
    key = folder / "key.pem"
    certificate = folder / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=here -addext"
    files = ["-keyout", str(key), "-out", str(certificate)]
    words = [*command.split(), "subjectAltName=DNS:localhost", *files]
    subprocess.run(words, check=True, capture_output=True)
    return certificate, key


def test_tls_is_checked_against_the_certificate_that_is_trusted(certified):
    certificate, key = certified
    with served(Jpeg(), ssl_certfile=certificate, ssl_keyfile=key) as url:
        port = url.rpartition(":")[2]
        trusting = remote(f"https://localhost:{port}", ca_file=str(certificate))
        assert trusting(IMAGES, PROMPTS).values == Jpeg()(IMAGES, PROMPTS).values
        for address, options in (("localhost", {}), ("127.0.0.1", {"ca_file": str(certificate)})):
            stranger = remote(f"https://{address}:{port}", max_attempts=1, **options)
            with pytest.raises(
                ServerError, match=r"cannot be reached .*certificate verify failed.*ca_file"
            ):
                stranger(IMAGES, PROMPTS)


def test_tls_that_breaks_in_the_middle(certified):
    """What follows the handshake is not TLS."""

    def breaks(connection: socket.socket, received: Received, server: Scripted) -> None:
        os.write(connection.fileno(), b"in the clear" * 20)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certified)
    with scripted(breaks, context) as server:
        reward = remote(f"https://localhost:{server.server_address[1]}", ca_file=str(certified[0]))
        with pytest.raises(ServerError, match=r"broke off or does not speak HTTP"):
            reward(IMAGES, PROMPTS)
    assert len(server.received) == 1


def test_texts_and_parts():
    texts = ["0", "x1", "2", "", "4"]
    with served(ExactMatch()) as url:
        assert remote(url, part_names=("contains",))(texts, PROMPTS) == ExactMatch()(texts, PROMPTS)
        with pytest.raises(ValueError, match="the part 'edit' of the answer must be a list"):
            remote(url, part_names=("edit",))(texts, PROMPTS)


def test_videos_and_samples_without_a_score():
    videos = RNG.integers(0, 256, (3, 4, 6, 8, 3), dtype=np.uint8)
    with served(Video()) as url:
        scores = remote(url, part_names=("last",))(videos, PROMPTS[:3])
        assert np.isnan(scores.values[0])
        assert scores.values[1:] == videos[1:, 0, 0, 0, 0].tolist()
        assert scores.parts == {"last": videos[:, -1, 0, 0, 0].tolist()}
        with pytest.raises(ServerError, match=r"answered 500.*RuntimeError: broken on purpose"):
            remote(url)(videos, PROMPTS[1:4])
        with pytest.raises(ServerError, match=r"422.*this reward scores videos, not images"):
            remote(url)(IMAGES, PROMPTS)


class Slow(Reward):
    """Waits for `go`, and records whom it scored."""

    kind = "text"

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.scored = []

    def __call__(self, samples, prompts):
        self.begun.set()
        assert self.go.wait(120)
        self.scored += samples
        return Scores(values=[0.0] * len(samples))


def test_a_request_whose_client_is_gone_is_not_scored():
    reward = Slow()
    with served(reward) as url, ThreadPoolExecutor() as pool:
        first = pool.submit(remote(url), ["first"], PROMPTS[:1])
        assert reward.begun.wait(60)
        with pytest.raises(ServerError, match="no answer within"):
            remote(url, deadline_s=1)(["gone"], PROMPTS[:1])
        reward.go.set()
        first.result()
        remote(url)(["last"], PROMPTS[:1])
    assert reward.scored == ["first", "last"]


def test_samples_prompts_and_their_images_arrive_as_they_were_sent(tmp_path):
    file = base64.b64decode(encode_png(IMAGES[0]))
    (tmp_path / "a.png").write_bytes(file)
    chat = replace(PROMPTS[1], messages=({"role": "user", "content": "1+1"},))
    prompts = [replace(PROMPTS[0], images=(str(tmp_path / "a.png"), file)), chat, *PROMPTS[2:]]
    request = encode(IMAGES, prompts)
    assert ["images" in row for row in request["prompts"]] == [True] + [False] * (len(prompts) - 1)
    samples, received = decode(json.loads(json.dumps(request)))
    assert np.array_equal(samples, IMAGES)
    # Of a chat, the text is sent.
    assert received == [replace(PROMPTS[0], images=(file, file)), *PROMPTS[1:]]


PNG = encode_png(IMAGES[0])
_FILE = BytesIO()
Image.new("1", (6000, 6000)).save(_FILE, "PNG")
HUGE = base64.b64encode(_FILE.getvalue()).decode()  # a small file with many pixels
GOOD = {"kind": "image", "samples": [PNG], "prompts": [{"text": "a"}]}


SAMPLES = "must be text and strings, image and PNG files in base64, or video and lists"
COUNT = "as many samples as prompts, and at least one"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "latent"}, "this reward scores images, not latents"),
        ({"samples": []}, COUNT),
        ({"samples": [PNG, PNG]}, COUNT),
        ({"more": 1}, COUNT),
        ({"samples": ["AAAA"]}, "PNG file in base64"),
        ({"samples": [PNG[: len(PNG) // 2]]}, "PNG file in base64"),
        ({"samples": [[PNG]]}, "PNG file in base64"),
        ({"samples": [PNG, encode_png(IMAGES[0, :5])], "prompts": [{}, {}]}, "one size"),
        ({"prompts": ["a"]}, "a prompt is an object with text, "),
        ({"prompts": [{"text": 1}]}, "not text=1"),
        ({"prompts": [{"__class__": "x"}]}, "not __class__='x'"),
        ({"prompts": [{"images": "AAAA"}]}, "images (a list of files)"),
        ({"prompts": [{"images": ["no base64"]}]}, "images must be files in base64"),
        ({"prompts": [{"images": [1]}]}, "images must be files in base64"),
        ({"prompts": [{"images": ["AAAA"]}]}, "cannot be read as a picture"),
        ({"prompts": [{"images": [HUGE] * 2}]}, "too many pixels"),
    ],
)
def test_bad_requests_are_refused_in_words(change, said, jpegs):
    done = httpx2.post(f"{jpegs}/v1/score", json=GOOD | change, headers=HEADERS)
    assert (done.status_code, said in done.json()["detail"]) == (422, True), done.text


@pytest.mark.parametrize(
    ("kind", "sample"), [("text", 1), ("video", PNG), ("video", []), ("latent", PNG)]
)
def test_samples_of_another_kind_are_refused(kind, sample):
    with pytest.raises(ValueError, match=SAMPLES):
        decode(GOOD | {"kind": kind, "samples": [sample]})


def test_who_gets_in():
    with served(Jpeg(), max_body_mb=0.01) as url, httpx2.Client() as client:

        def status(**options: Any) -> int:
            headers = HEADERS | options.pop("headers", {})
            return client.post(f"{url}/v1/score", headers=headers, **options).status_code

        assert status(json=GOOD) == 200
        for wrong in ("", f"Bearer {TOKEN}x", TOKEN):
            assert status(json=GOOD, headers={"Authorization": wrong}) == 401
        assert status(content=b"[" * 5_000) == 422
        assert status(json={"samples": "a" * 20_000}) == 413
        assert status(content=(b" " * 5_000 for _ in range(9))) == 413
        assert client.get(f"{url}/openapi.json").status_code == 404


def test_a_body_has_a_deadline(jpegs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)

    def drips() -> Iterator[bytes]:
        for _ in range(20):
            time.sleep(0.05)
            yield b" "

    answer = httpx2.post(f"{jpegs}/v1/score", content=drips(), headers=HEADERS)
    assert answer.status_code == 408


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jpg"], "did you mean 'jpeg'"),
        (["jpeg", "quality"], "write options of the reward as key=value"),
        (["jpeg", "quality=500"], "quality=500: give a whole number from 1 to 95"),
        (["jpeg", "quality={"], "quality={ is no YAML"),
        (["jpeg", "quality=!!python/object/apply:os.getcwd []"], "os.getcwd [] is no YAML"),
        (["jpeg", "--host", "0.0.0.0"], "--certificate and --key"),
        (["jpeg", "--certificate", "here.pem"], "both --certificate and --key"),
        (["jpeg", "--token-env", "UNSET_VARIABLE"], "variable of that name is unset"),
        (["function", "path=math:pow", "kind=latent"], "latents, which do not travel"),
    ],
)
def test_arguments_that_the_command_refuses(arguments, message, capsys):
    assert main(["serve-reward", *arguments]) == 2
    assert message in capsys.readouterr().err


class Connection(asyncio.Transport):
    """A connection that notes when it is closed."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door
        self.closed = False

    def abort(self) -> None:
        self.closed = True
        self._door.leave(self)


async def knocked(count: int, door: Door) -> list[bool]:
    """Returns which of the connections are closed, of which the first one was let in."""
    connections = [Connection(door) for _ in range(count)]
    for place, connection in enumerate(connections):
        door.knock(connection)
        if place == 0:
            door.leave(connection)
    await asyncio.sleep(0.1)
    return [connection.closed for connection in connections]


def test_a_connection_has_a_deadline_until_it_is_let_in() -> None:
    assert asyncio.run(knocked(2, Door(deadline_s=0.02))) == [False, True]


def test_a_new_connection_takes_the_place_of_the_oldest() -> None:
    closed = asyncio.run(knocked(5, Door(deadline_s=60, most=2)))
    assert closed == [False, True, True, False, False]

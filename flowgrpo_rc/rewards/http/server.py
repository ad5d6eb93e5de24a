"""An HTTP server for a reward of the package, which the reward `remote` asks.

It demands a bearer token, limits time and size of a request and runs one call at a time.
"""

import asyncio
import hmac
import json
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.plugins import build, load_class
from flowgrpo_rc.rewards.base import Reward
from flowgrpo_rc.rewards.http.client import check_packages, is_loopback, read_token
from flowgrpo_rc.rewards.http.door import Door, protocol
from flowgrpo_rc.rewards.http.wire import PATH, decode, encode_scores

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

PACKAGE = "flowgrpo_rc.rewards"
PACKAGES = ("fastapi", "uvicorn")
BODY_S = 300.0  # for the body of a request, of a client that has shown the token
MOST_CONNECTIONS = 256  # of all clients; above, requests are answered 503


def make_app(reward: Reward, token: str, *, max_body_mb: float) -> "FastAPI":
    """Makes the application that scores requests in the format of `rewards/http/wire.py`.

    It answers 401 without the token, 408 to a body that takes too long, 413 to one that is too
    long, 415 to another type than JSON, 422 to a body that is no request or whose samples the
    reward does not score, and 500 with the exception if the reward fails.
    """
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool

    app = FastAPI(title=type(reward).__name__, docs_url=None, redoc_url=None, openapi_url=None)
    one_at_a_time = asyncio.Lock()

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            raise HTTPException(401, "wrong or missing bearer token", headers)
        request.state.let_in()

    @app.get("/v1/reward", dependencies=[Depends(authorize)])
    def about() -> dict[str, Any]:
        return {
            "name": type(reward).__name__,
            "kind": reward.kind,
            "part_names": list(reward.part_names),
            "requires_target": reward.requires_target,
        }

    @app.post(PATH, dependencies=[Depends(authorize)])
    async def score(request: Request) -> dict[str, Any]:
        asked = await _body(request, max_body_mb)
        try:
            samples, prompts = await run_in_threadpool(decode, asked)
            if reward.kind not in (asked["kind"], "any"):
                raise ValueError(f"this reward scores {reward.kind}s, not {asked['kind']}s")
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        async with one_at_a_time:
            if await request.is_disconnected():  # it gave up while others were served
                raise HTTPException(499, "the client is gone")
            try:
                return encode_scores(await run_in_threadpool(reward, samples, prompts))
            # A reward is foreign code: any exception of it fails this request and no other.
            except Exception as error:
                raise HTTPException(500, f"{type(error).__name__}: {error}") from error

    return app


async def _body(request: "Request", max_body_mb: float) -> Any:
    """Reads the JSON in the body of a request; refuses a long or slow one before all is read."""
    from fastapi import HTTPException

    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise HTTPException(415, "send application/json")
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_body_mb * 1e6:
                    raise HTTPException(413, f"the body is longer than {max_body_mb:g} MB")
    except TimeoutError as error:
        raise HTTPException(408, f"the body took more than {BODY_S:g} s") from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is no JSON ({type(error).__name__})") from error


def limits(door: Door) -> dict[str, Any]:
    """Returns the settings of uvicorn that an application of `make_app` needs."""
    return {
        "http": protocol(door),
        "ws": "none",
        "limit_concurrency": MOST_CONNECTIONS,
        "access_log": False,
    }


def serve(
    name: str,
    options: dict[str, Any],
    *,
    token_env: str,
    host: str,
    port: int,
    certificate: str | None,
    key: str | None,
    max_body_mb: float,
) -> None:
    """Serves a reward until interrupted.

    Args:
      name: a reward of the package, or the full path of a class.
      options: keyword arguments of the reward.
      token_env: name of the environment variable with the token that clients must send.
      certificate: file with the TLS certificate; None for plain HTTP, on this machine only.
      key: file with the key of the certificate.
      max_body_mb: longest body of a request, in MB.
    """
    check_packages("serve-reward", PACKAGES, "serve")
    token = read_token(token_env)
    if (certificate is None) != (key is None):
        raise ValueError("give both --certificate and --key, or none")
    if certificate is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} would let samples and token travel in the clear: give --certificate "
            "and --key, or keep 127.0.0.1 and let clients come through a tunnel"
        )
    reward: Reward = build(load_class(PACKAGE, name, Reward), options, name)
    if reward.kind == "latent":
        raise ValueError(f"{name} scores latents, which do not travel")
    if reward.groupwise:
        raise ValueError(f"{name} compares whole groups, and a request holds a few samples")
    reward.check()
    import uvicorn

    app = make_app(reward, token, max_body_mb=max_body_mb)
    tls: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key}
    uvicorn.run(app, host=host, port=port, **tls, **limits(Door()))

"""A JSON client for servers that are not trusted: they may hang, drip, lie or flood.

* Every call ends by its deadline.
* A failed request is sent again, after a random pause, only if the server surely did nothing or
  asks for it.
* Nothing is unpickled; redirects and compressed answers are refused; an answer is read up to a
  limit.
* The token comes from an environment variable that the configuration names, and is cut out of the
  answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import random
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo_rc.plugins import check_packages
from flowgrpo_rc.rewards.base import check_range

if TYPE_CHECKING:
    import httpx2

NO_ACCESS = (401, 403)
MAX_PORT = 2**16 - 1
BUSY = (429, 502, 503, 504)  # the server, or a proxy before it, asks to come again
_FIRST_PAUSE_S = 0.5  # at most, before the second attempt; doubles with every further one
_LONGEST_QUOTE = 200  # characters of what a server says
_TOKEN = re.compile(r"[\w.~+/-]+=*", re.ASCII)  # the form of RFC 6750
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[\w.-]+|\[[0-9a-f:.%]+\])(:(?P<port>[0-9]{1,5}))?(/[^?#@\s]*)?"
)
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,3})?")


class ServerError(RuntimeError):
    """The server cannot be reached, failed, or gave an answer of the wrong form.

    Attributes:
      after_s: nothing was done, so the request may be sent again after so many seconds; None: it
        may not.
    """

    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(kw_only=True, eq=False, repr=False)
class JsonClient:
    """Posts JSON objects and returns the JSON of the answers.

    Raises:
      ValueError: an option is out of range, the variable is unset, the address would show token or
        samples to others, or the package of the extra `remote` is missing.
    """

    url: str  # https, or http to this machine; without user, query and fragment
    token_env: str | None = None  # the environment variable that holds the bearer token
    ca_file: str | None = None  # certificates (PEM) to trust instead of the system's
    deadline_s: float = 120.0  # of one call, with all of its requests, retries and pauses
    max_attempts: int = 4  # to send one request
    max_pause_s: float = 10.0  # between attempts; random, its range grows from half a second
    max_response_mb: float = 16.0  # a larger answer is cut off and refused

    def __post_init__(self) -> None:
        check_packages("a reward over HTTP", ("httpx2",), "remote")
        names = ("deadline_s", "max_pause_s", "max_response_mb")
        check_range(1e-3, **{name: getattr(self, name) for name in names})
        check_range(1, max_attempts=self.max_attempts)
        _check_url(self.url)
        self._url = self.url.rstrip("/")
        self._token = None if self.token_env is None else read_token(self.token_env)
        encrypted = self._url.startswith("https") or self.ca_file is not None
        self._tls = _trusting(self.ca_file) if encrypted else False
        # At their lowest level these loggers print headers, which a server may fill with the token.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)

    def post_each(
        self, path: str, bodies: Sequence[Mapping[str, object]], *, concurrency: int = 1
    ) -> list[object]:
        """Sends requests as `post_all` does; raises the ServerError of the first that failed."""
        answers = self.post_all(path, bodies, concurrency=concurrency)
        for answer in answers:
            if isinstance(answer, ServerError):
                raise answer
        return answers

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, object]], *, concurrency: int = 1
    ) -> list[object]:
        """Sends requests; returns the answer to each in order, or its ServerError."""
        return asyncio.run(self._post_all(path, bodies, concurrency))

    async def _post_all(
        self, path: str, bodies: Sequence[Mapping[str, object]], concurrency: int
    ) -> list[object]:
        import httpx2

        turn = asyncio.Semaphore(concurrency)
        end = time.monotonic() + self.deadline_s
        asyncio.get_running_loop().set_default_executor(_Lookups())

        async def answer(body: Mapping[str, object]) -> object:
            try:
                async with asyncio.timeout(end - time.monotonic()), turn:
                    return await self._send(client, path, body)
            except TimeoutError:
                limit = f"deadline_s={self.deadline_s:g}"
                return ServerError(f"{self._url} gave no answer within {limit}")

        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        async with httpx2.AsyncClient(
            headers=headers,
            verify=self._tls,
            # The deadline ends a request; connecting may take half of it.
            timeout=httpx2.Timeout(None, connect=self.deadline_s / 2),
            follow_redirects=False,
            # A proxy of the environment would see the samples; .netrc could send other credentials.
            trust_env=False,
        ) as client:
            return await asyncio.gather(*(answer(body) for body in bodies))

    async def _send(
        self, client: httpx2.AsyncClient, path: str, body: Mapping[str, object]
    ) -> object:
        """Sends a request up to `max_attempts` times; returns its answer, or a ServerError."""
        for attempt in range(self.max_attempts):
            answer = await self._send_once(client, path, body)
            if not isinstance(answer, ServerError) or answer.after_s is None:
                break
            if attempt + 1 < self.max_attempts:
                longest = min(self.max_pause_s, _FIRST_PAUSE_S * 2**attempt)
                await asyncio.sleep(answer.after_s + random.uniform(0, longest))
        return answer

    async def _send_once(
        self, client: httpx2.AsyncClient, path: str, body: Mapping[str, object]
    ) -> object:
        import httpx2

        content = bytearray()
        try:
            async with client.stream("POST", f"{self._url}{path}", json=body) as response:
                # Raw, since a short compressed answer may become a long one.
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self.max_response_mb * 1e6:
                        limit = f"max_response_mb={self.max_response_mb:g}"
                        return ServerError(f"{self._url} answered more than {limit}")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            # Nothing has been sent yet, so the text of the error cannot hold the token.
            why = f"cannot be reached ({type(error).__name__}: {error})"
            remedy = "start the server first, and check url"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = "ca_file must name the certificate of its authority"
            return ServerError(f"{self._url} {why}: {remedy}", after_s=0.0)
        except (httpx2.HTTPError, ssl.SSLError) as error:
            # The text of the error may hold what the server sent, so only its type is named.
            kind = type(error).__name__
            return ServerError(f"{self._url} broke off or does not speak HTTP ({kind})")
        if self._token is not None:
            content = content.replace(self._token.encode(), b"***")
        return self._parsed(response, content)

    def _parsed(self, response: httpx2.Response, content: bytearray) -> object:
        answered = f"{self._url} answered {response.status_code}"
        if response.status_code in BUSY:
            pause = response.headers.get("retry-after", "")
            return ServerError(answered, after_s=_seconds_until(pause))
        if response.status_code in NO_ACCESS:
            return ServerError(f"{answered}: token_env must name the variable with its token")
        if response.status_code != 200:
            words = content.decode(errors="replace")[:_LONGEST_QUOTE]
            return ServerError(f"{answered}: {words!a}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            kind = type(error).__name__
            return ServerError(f"{self._url} answered something else than plain JSON ({kind})")


class _Lookups(ThreadPoolExecutor):
    """Runs DNS look-ups. One that hangs cannot be stopped, so nobody waits for it at the end."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def is_loopback(host: str) -> bool:
    """Returns True if a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(name: str) -> str:
    """Returns the bearer token in the environment variable `name`.

    The message of the ValueError without one repeats no name, which may be a token by mistake.
    """
    token = os.environ.get(name, "")
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            "token_env must be the name of an environment variable, not a token: the environment "
            "variable of that name is unset, or holds no token"
        )
    return token


def _seconds_until(retry_after: str) -> float:
    """Returns the pause of a `Retry-After` header, a number or a date; 0 if it is neither."""
    if _SECONDS.fullmatch(retry_after):
        return float(retry_after)
    date = parsedate_tz(retry_after)
    return 0.0 if date is None else max(0.0, mktime_tz(date) - time.time())


def _check_url(url: str) -> None:
    """Raises ValueError for an address of another form; it may hold a token and is not repeated."""
    address = _URL.fullmatch(url)
    if address is None or int(address["port"] or 0) > MAX_PORT:
        raise ValueError(
            "url must begin with https:// or, to this machine, http:// and a host; a port up to "
            f"{MAX_PORT} and a path may follow, but no user, query or fragment: a token goes into "
            "token_env"
        )
    if address["scheme"] == "http" and not is_loopback(address["host"].strip("[]")):
        raise ValueError(
            f"url={url!r} would send samples and token in the clear: use https, or a tunnel to "
            "this machine such as ssh -L 8000:localhost:8000"
        )


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    """Returns what trusts the authorities in a file, or those of the system."""
    try:
        return ssl.create_default_context(cafile=ca_file and Path(ca_file).expanduser())
    except OSError as error:
        raise ValueError(f"{ca_file=}: give a file of certificates in PEM ({error})") from error

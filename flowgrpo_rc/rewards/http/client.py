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
import math
import os
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flowgrpo_rc.plugins import check_packages

if TYPE_CHECKING:
    import httpx2
    from tenacity import RetryCallState

PACKAGES = ("httpx2", "tenacity")
NO_ACCESS = (401, 403)
BUSY = (429, 502, 503, 504)  # the server, or a proxy before it, asks to come again
_LONGEST_QUOTE = 200  # characters of what a server says
_TOKEN = re.compile(r"[\w.~+/-]+=*", re.ASCII)  # the form of RFC 6750


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
        samples to others, or the packages of the extra `remote` are missing.
    """

    url: str  # https, or http to this machine; without user, query and fragment
    token_env: str | None = None  # the environment variable that holds the bearer token
    ca_file: str | None = None  # certificates (PEM) to trust instead of the system's
    deadline_s: float = 120.0  # of one call, with all of its requests, retries and pauses
    max_attempts: int = 4  # to send one request
    max_pause_s: float = 10.0  # between attempts; random, its range grows from half a second
    max_response_mb: float = 16.0  # a larger answer is cut off and refused

    def __post_init__(self) -> None:
        check_packages("a reward over HTTP", PACKAGES, "remote")
        for name in ("deadline_s", "max_pause_s", "max_response_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: give a number above 0")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts} must be at least 1")
        _check_url(self.url)
        self._url = self.url.rstrip("/")
        self._token = None if self.token_env is None else read_token(self.token_env)
        self._tls: bool | ssl.SSLContext = True
        if self.ca_file is not None:
            self._tls = _trusting(self.ca_file)
        elif "SSL_CERT_FILE" in os.environ:
            self._tls = ssl.create_default_context()
        # At their lowest level these loggers print headers, which a server may fill with the token.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)

    def post_each(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, concurrency: int = 1
    ) -> list[Any]:
        """Sends requests as `post_all` does; raises the ServerError of the first that failed."""
        answers = self.post_all(path, bodies, concurrency=concurrency)
        for answer in answers:
            if isinstance(answer, ServerError):
                raise answer
        return answers

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, concurrency: int = 1
    ) -> list[Any | ServerError]:
        """Sends several requests; returns the answer to each in order, or why it has none."""
        return asyncio.run(self._post_all(path, bodies, concurrency))

    async def _post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
    ) -> list[Any | ServerError]:
        import httpx2
        from tenacity import retry, retry_if_exception, stop_after_attempt

        send = retry(
            retry=retry_if_exception(_may_be_repeated),
            stop=stop_after_attempt(self.max_attempts),
            wait=self._pause,
            reraise=True,
        )(self._send)
        turn = asyncio.Semaphore(concurrency)
        end = time.monotonic() + self.deadline_s
        asyncio.get_running_loop().set_default_executor(_Lookups())

        async def answer(body: Mapping[str, Any]) -> Any | ServerError:
            try:
                async with asyncio.timeout(end - time.monotonic()), turn:
                    return await send(client, path, body)
            except TimeoutError:
                limit = f"deadline_s={self.deadline_s:g}"
                return ServerError(f"{self._url} gave no answer within {limit}")
            except ServerError as error:
                return error

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

    def _pause(self, state: RetryCallState) -> float:
        """Returns the seconds before the next attempt: random, after those that the server asks."""
        from tenacity import wait_random_exponential

        error = state.outcome.exception() if state.outcome else None
        after_s = error.after_s if isinstance(error, ServerError) else None
        return (after_s or 0.0) + wait_random_exponential(multiplier=0.5, max=self.max_pause_s)(
            state
        )

    async def _send(self, client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
        import httpx2

        content = bytearray()
        try:
            async with client.stream("POST", f"{self._url}{path}", json=body) as response:
                # Raw, since a short compressed answer may become a long one.
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self.max_response_mb * 1e6:
                        limit = f"max_response_mb={self.max_response_mb:g}"
                        raise ServerError(f"{self._url} answered more than {limit}")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            # Nothing has been sent yet, so the text of the error cannot hold the token.
            why = f"cannot be reached ({type(error).__name__}: {error})"
            remedy = "start the server first, and check url"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = "ca_file must name the certificate of its authority"
            raise ServerError(f"{self._url} {why}: {remedy}", after_s=0.0) from None
        except (httpx2.HTTPError, ssl.SSLError) as error:
            # The text of the error may hold what the server sent, so only its type is named.
            kind = type(error).__name__
            raise ServerError(f"{self._url} broke off or does not speak HTTP ({kind})") from None
        if self._token is not None:
            content = content.replace(self._token.encode(), b"***")
        return self._parsed(response, bytes(content))

    def _parsed(self, response: httpx2.Response, content: bytes) -> Any:
        status = response.status_code
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        if status in BUSY:
            after_s = _seconds(response.headers.get("retry-after", ""))
            raise ServerError(f"{self._url} answered {status}", after_s=after_s)
        if status in NO_ACCESS:
            remedy = "token_env must name the variable with its token"
            raise ServerError(f"{self._url} answered {status}: {remedy}")
        if status != 200:
            words = ascii(content.decode(errors="replace")[:_LONGEST_QUOTE])
            why = f": {words}" if kind == "application/json" else ""
            raise ServerError(f"{self._url} answered {status}{why}")
        if kind != "application/json" or "content-encoding" in response.headers:
            raise ServerError(f"{self._url} answered something else than plain application/json")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            kind = type(error).__name__
            raise ServerError(f"{self._url} answered broken JSON ({kind})") from None


def _may_be_repeated(error: BaseException) -> bool:
    return isinstance(error, ServerError) and error.after_s is not None


def _seconds(retry_after: str) -> float:
    """Returns the pause that a Retry-After asks for by a number or a date; 0 for anything else."""
    if re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", retry_after):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


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
    if not (name.isidentifier() and name.isascii()):
        raise ValueError("token_env must be the name of an environment variable, not a token")
    token = os.environ.get(name, "")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token_env: the environment variable of that name is unset, or no token")
    return token


def _check_url(url: str) -> None:
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError("url must begin with https:// or, to this machine, http:// and a host")
    try:
        _ = address.port  # urlsplit parses the port only here
    except ValueError:
        raise ValueError("url must have a port from 0 to 65535 after the host, or none") from None
    if "@" in address.netloc or address.query or address.fragment:
        raise ValueError("url must have no user, query or fragment: a token goes into token_env")
    if address.scheme == "http" and not is_loopback(address.hostname):
        raise ValueError(
            f"url={url!r} would send samples and token in the clear: use https, or a tunnel to "
            "this machine such as ssh -L 8000:localhost:8000"
        )


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=Path(ca_file).expanduser())
    except OSError as error:
        raise ValueError(f"{ca_file=}: give a file of certificates in PEM ({error})") from error

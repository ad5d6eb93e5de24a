"""`flowgrpo-rc serve-reward`: serve a reward over HTTP."""

import argparse
import os

import yaml

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.names import TOKEN_ENV
from flowgrpo_rc.plugins import build, check_packages, in_seconds, load_class, refuse
from flowgrpo_rc.rewards.base import Reward
from flowgrpo_rc.rewards.http.client import is_loopback, read_token
from flowgrpo_rc.rewards.http.server import Door, limits, make_app
from flowgrpo_rc.rewards.manager import PACKAGE

PACKAGES = ("fastapi", "uvicorn")


def main(arguments: argparse.Namespace) -> int:
    """Serves a reward until interrupted; its options are read as YAML.

    Without a certificate it serves plain HTTP, to this machine alone.
    """
    name = arguments.reward
    certificate = arguments.certificate
    key = arguments.key
    options = dict(_option(option) for option in arguments.options)
    refuse(
        (
            arguments.token_env == TOKEN_ENV and TOKEN_ENV not in os.environ,
            f"serve-reward needs a token that clients send: set {TOKEN_ENV}, or name the variable "
            "that holds it with --token-env",
        ),
    )
    check_packages("serve-reward", PACKAGES, "serve")
    token = read_token(arguments.token_env)
    refuse(
        ((certificate is None) != (key is None), "give both --certificate and --key, or none"),
        (
            certificate is None and not is_loopback(arguments.host),
            f"--host {arguments.host} would let samples and token travel in the clear: give "
            "--certificate and --key, or keep 127.0.0.1 and let clients come through a tunnel",
        ),
    )
    reward: Reward = build(load_class(PACKAGE, name, Reward), options, name)
    refuse(
        (reward.kind == "latent", "scores latents, which do not travel"),
        (reward.groupwise, "compares whole groups, and a request holds a few samples"),
        about=f"{name} ",
    )
    reward.check()
    import uvicorn

    app = make_app(reward, token, max_body_mb=arguments.max_body_mb)
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
    uvicorn.run(app, host=arguments.host, port=arguments.port, **tls, **limits(Door()))
    return EXIT_OK


def _option(written: str) -> tuple[str, object]:
    key, equals, value = written.partition("=")
    if not (key and equals):
        raise ValueError(f"{written!r}: write options of the reward as key=value")
    try:
        return key, in_seconds(key, yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ValueError(f"{written} is no YAML of plain values: {error}") from error

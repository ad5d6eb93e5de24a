"""`flowgrpo-rc serve-reward`: serve a reward over HTTP."""

from __future__ import annotations

import argparse
import os

import yaml

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.config.names import TOKEN_ENV
from flowgrpo_rc.plugins import in_seconds
from flowgrpo_rc.rewards.http.server import serve


def main(arguments: argparse.Namespace) -> int:
    """Serves a reward until interrupted; its options are read as YAML."""
    options = {}
    for option in arguments.options:
        key, equals, value = option.partition("=")
        if not (key and equals):
            raise ValueError(f"{option!r}: write options of the reward as key=value")
        try:
            options[key] = in_seconds(key, yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ValueError(f"{option} is no YAML of plain values: {error}") from error
    if arguments.token_env == TOKEN_ENV and TOKEN_ENV not in os.environ:
        raise ValueError(
            f"serve-reward needs a token that clients send: set {TOKEN_ENV}, or name the variable "
            "that holds it with --token-env"
        )
    serve(
        arguments.reward,
        options,
        token_env=arguments.token_env,
        host=arguments.host,
        port=arguments.port,
        certificate=arguments.certificate,
        key=arguments.key,
        max_body_mb=arguments.max_body_mb,
    )
    return EXIT_OK

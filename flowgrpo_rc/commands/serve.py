"""`flowgrpo-rc serve-reward`: serve a reward over HTTP."""

from __future__ import annotations

import argparse

import yaml

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.rewards.http.server import serve


def main(arguments: argparse.Namespace) -> int:
    """Serves a reward until interrupted; its options are read as YAML."""
    options = {}
    for option in arguments.options:
        key, equals, value = option.partition("=")
        if not (key and equals):
            raise ValueError(f"{option!r}: write options of the reward as key=value")
        options[key] = yaml.safe_load(value)
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

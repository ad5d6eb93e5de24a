"""Secrets are removed before anything is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowgrpo_rc.files import redact


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"api_key": "x", "HF_TOKEN": "x", "password": "x", "a": [{"client_secret": "x"}]}, None),
        ({"url": "https://me:x1y2@host/score"}, {"url": "https://***@host/score"}),
        (
            ["reward.remote.api_key=x y", "Authorization: Bearer x"],
            ["reward.remote.api_key=*** y", "Authorization: Bearer ***"],
        ),
        ("hf_abcdefghijklmnopqrst", "***"),
    ],
)
def test_secrets_are_removed(value: Any, expected: Any) -> None:
    if expected is None:
        expected = json.loads(json.dumps(value).replace('"x"', '"***"'))
    assert redact(value) == expected


def test_what_is_no_secret_stays() -> None:
    config = {
        "rollout_is": "token",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_rs": "token_k1",
        "max_tokens": 3,
        "token": None,
        "url": "http://host:8000/score",
        "prompt": 'a sign that says "K3Y"',
        "keys": ["a", "b"],
    }
    assert redact(config) == config

"""Secrets are removed before anything is written, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from flowgrpo_rc.config.compose import compose_all, unchecked_config
from flowgrpo_rc.files import redact, redact_command

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIB\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "API_KEY", "apiKey", "apikey", "X-Api-Key", "openaiKey", "api_keys", "key"),
        *("token", "hf_token", "HF_TOKEN", "accessToken", "auth_tokens", "bearer", "Authorization"),
        *("password", "db_password", "passwd", "client_secret", "clientSecret", "secrets"),
        *("credentials", "AWSAccessKeyId", "AWS_SECRET_ACCESS_KEY", "AccountKey", "session_cookie"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redact({"a": [{name: "x1"}]}) == {"a": [{name: "***"}]}
    assert redact(f"the run got {name}=x1, and more") == f"the run got {name}=***, and more"
    assert redact(f'{{"{name}": "x1 y", "b": 2}}') == f'{{"{name}": ***, "b": 2}}'
    assert redact_command(["train", f"a.{name}=x1 y", "b=2"]) == f"train a.{name}=*** b=2"
    nested = f"a={{b: {{c: 1, {name}: x1 y}}}}"
    assert redact_command([nested]) == f"a={{b: {{c: 1, {name}: ***}}}}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"password": 1234, "key": 3, "token": 50256},
            {"password": "***", "key": 3, "token": 50256},
        ),
        (
            {"headers": {"Accept": "a", "X-Id": ["b", 1]}, "auth": ["me", "x"]},
            {"headers": {"Accept": "***", "X-Id": ["***", "***"]}, "auth": ["***", "***"]},
        ),
        ({"url": "https://me:x1y2@host/score"}, {"url": "https://***@host/score"}),
        ("https://abcdefgh12345678@host/a", "https://***@host/a"),
        (
            "https://host/a?x=1&X-Amz-Signature=ab1&y=2",
            "https://host/a?x=1&X-Amz-Signature=***&y=2",
        ),
        ("see https://host/a?sig=a%2Fb1 now", "see https://host/a?sig=*** now"),
        (
            "https://h/a?AWSAccessKeyId=a1&token=b&key=c#code=d",
            "https://h/a?AWSAccessKeyId=***&token=***&key=***#code=***",
        ),
        (
            ["reward.remote.api_key=x y", "Authorization: Bearer x"],
            ["reward.remote.api_key=*** y", "Authorization: Bearer ***"],
        ),
        ("hf_abcdefghijklmnopqrst", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        (f"it says {JWT}.", "it says ***."),
        (f"a\n{PEM}\nb", "a\n***\nb"),
        ("sent Bearer abcdefgh12345", "sent Bearer ***"),
    ],
)
def test_secrets_are_removed(value: Any, expected: Any) -> None:
    found = redact(value)
    assert found == expected
    assert redact(found) == found


def test_values_of_the_environment_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter22")
    monkeypatch.setenv("OTHER_TOKEN", "hunter22hunter22")
    monkeypatch.setenv("SHORT_SECRET", "ocr")
    monkeypatch.setenv("SORT_KEY", "ascending")
    given = {"a": "hunter22/b", "b": ["hunter22hunter22"], "c": "ocr ascending"}
    assert redact(given) == {"a": "***/b", "b": ["***"], "c": "ocr ascending"}
    assert redact_command(["--name", "hunter22"]) == "--name ***"


def test_secrets_on_a_command_line() -> None:
    words = ["run.py", "--api-key", "x", "--steps", "3", "--token=y z", "--password", "--fast"]
    expected = "run.py --api-key *** --steps 3 --token=*** --password --fast"
    assert redact_command(words) == expected
    headers = "a.headers={Accept: b, X-Id: c d}"
    assert redact_command([headers, "key=left"]) == "a.headers=*** key=***"


def test_what_is_no_secret_stays() -> None:
    config = {
        "rollout_is": "token",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_rs": "token_k1",
        "max_tokens": 3,
        "max_token": "all",
        "token": None,
        "token_env": "FLOWGRPO_REWARD_TOKEN",
        "token_loss": {"loss_mode": "ppo_clip"},
        "tokens": ["a", "b"],
        "eos_token": "</s>",
        "password_file": "none",
        "url": "http://host:8000/score?size=512&keywords=a",
        "repository": "ssh://git@host/a",
        "prompt": 'a sign that says "K3Y", a key: gold, and a token: red',
        "keys": ["a", "b"],
        "keep_keys": ["a"],
        "hotkey": "ctrl",
        "monkey": "see",
        "sort_key": "name",
        "author": "me",
        "headers": False,
        "token_reward": {"weight": 1.0},
        "terms": {"token": {"weight": 1.0}, "key": {"_target_": "jpeg"}},
        "secretary": "me",
        "commit": "9d2212f0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6",
    }
    assert redact(config) == config
    assert redact(json.dumps(config)) == json.dumps(config)


@pytest.mark.parametrize("text", ["a", "a.", "a=", "a://", "://a:b", "eyJ", "a?b=c&", "token="])
def test_a_long_text_takes_no_time(text: str) -> None:
    before = time.process_time()
    redact(100_000 * text)
    assert time.process_time() - before < 5


@pytest.mark.parametrize("name", ["tiny_ocr", "token_grpo", "tiny_clip_ocr", "verl_omni"])
def test_settings_of_this_package_are_no_secrets(name: str) -> None:
    composed = compose_all(["model.path=a/b"], config_name=name)
    config = dataclasses.asdict(unchecked_config(composed.config))
    assert redact(config) == config

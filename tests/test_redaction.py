"""Secrets are removed before anything is written, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from flowgrpo_rc.config.compose import compose_all, to_config
from flowgrpo_rc.redaction import redact, redact_command


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "API_KEY", "apiKey", "apikey", "X-Api-Key", "api_keys", "key", "hf_key"),
        *("token", "hf_token", "HF_TOKEN", "accessToken", "hftoken", "bearer", "Authorization"),
        *("password", "dbpassword", "passwd", "client_secret", "clientSecret", "secrets", "pwd"),
        *("credentials", "AWSAccessKeyId", "AWS_SECRET_ACCESS_KEY", "AccountKey", "cookie", "dsn"),
        *("secret_id", "jwt", "session_id", "auth"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redact({"a": [{name: "x1"}]}) == {"a": [{name: "***"}]}
    assert redact(f"the run got {name}=x1, and more") == f"the run got {name}=***, and more"
    assert redact(f'{{"{name}": "x1 y", "b": 2}}') == f'{{"{name}": ***, "b": 2}}'
    assert redact_command(["train", f"a.{name}=x1 y", "b=2"]) == f"train a.{name}=*** b=2"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"password": 1234, "key": ["a"], "token": 50256},
            {"password": "***", "key": "***", "token": 50256},
        ),
        ({"url": "https://me:x1y2@host/score"}, {"url": "https://***@host/score"}),
        ("https://abcdefgh12345678@host/a", "https://***@host/a"),
        ("see https://host/a?x=1&sig=a%2Fb1 now", "see https://host/a?*** now"),
        ("Authorization: Bearer x1, Host: a", "Authorization: Bearer ***, Host: a"),
        (r"{\"api_key\": \"x1\", \"b\": 2}", r"{\"api_key\": ***, \"b\": 2}"),
        (r'{"password": "x\"y z", "b": 2}', '{"password": ***, "b": 2}'),
        ('{"api_key":\n  "x y",\n"b": 2}', '{"api_key":\n  ***,\n"b": 2}'),
        ("token=1abc", "token=***"),
        (
            {"terms": {"password": {"weight": 1.0, "note": "a", "api_key": "x"}}},
            {"terms": {"password": {"weight": 1.0, "note": "a", "api_key": "***"}}},
        ),
        (
            "reward.terms.password={api_key: x, a: {auth_token: x}, headers: {X-Api-Key: 'x y'}}",
            "reward.terms.password={api_key: ***, a: {auth_token: ***}, headers: {X-Api-Key: ***}}",
        ),
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
    monkeypatch.setenv("JUPYTER_PASSWORD", "workspace")
    monkeypatch.setenv("PIN_SECRET", "12345678")
    monkeypatch.setenv("APP_CREDENTIALS", __file__)
    common = ["workspace/a", "12345678", __file__]
    assert redact(common) == common
    given = {"a": "hunter22/b", "b": ["hunter22hunter22"], "c": "ocr"}
    assert redact(given) == {"a": "***/b", "b": ["***"], "c": "ocr"}
    assert redact_command(["--name", "hunter22"]) == "--name '***'"


def test_secrets_on_a_command_line() -> None:
    words = ["run.py", "--api-key", "x", "--steps", "3", "--token=y z", "--password", "--fast"]
    expected = "run.py --api-key *** --steps 3 --token=*** --password --fast"
    assert redact_command(words) == expected
    assert redact_command(["reward.terms.token={weight: 1}"]) == "'reward.terms.token={weight: 1}'"


def test_what_is_no_secret_stays() -> None:
    config = {
        "rollout_is": "token",
        "rollout_token_veto_threshold": 1e-4,
        "rollout_rs": "token_k1",
        "max_tokens": 3,
        "token_env": "FLOWGRPO_REWARD_TOKEN",
        "token_loss": {"loss_mode": "ppo_clip"},
        "tokens": ["a", "b"],
        "password_file": "none",
        "url": "http://host:8000/score",
        "prompt": 'a sign that says "K3Y", a key: gold, and a token: red',
        "keys": ["a", "b"],
        "monkey": "see",
        "author": "me",
        "headers": False,
        "terms": {"token": {"weight": 1.0}, "key": {"_target_": "jpeg"}},
        "score": "http://host:8000/score@v1",
        "usage": "pass --tokens a1 and (token, 1)",
        "commit": "9d2212f0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6",
    }
    assert redact({"token": None, **config}) == {"token": None, **config}
    assert redact(json.dumps(config)) == json.dumps(config)


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a.", "a=", "a://", "://a:b", "://a@", "a?b=c&", "token=", "token ", "key:{"),
        *('key="', "key=[", "key='\"", '"key" ', "\\", '"password":{', "password: Bearer "),
    ],
)
def test_a_long_text_takes_no_time(text: str) -> None:
    def seconds(times: int) -> float:
        before = time.process_time()
        redact(times * text)
        return time.process_time() - before

    # Four times the text would take 16 times as long if each place were read from all others.
    assert seconds(8_000) < 8 * seconds(2_000) + 0.2


@pytest.mark.parametrize("name", ["tiny_ocr", "token_grpo", "tiny_clip_ocr", "verl_omni"])
def test_settings_of_this_package_are_no_secrets(name: str) -> None:
    composed = compose_all(["model.path=a/b"], config_name=name)
    config = dataclasses.asdict(to_config(composed.config))
    assert redact(config) == config

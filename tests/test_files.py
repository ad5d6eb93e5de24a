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
        *("hftoken", "HFTOKEN", "dbpassword", "clientsecret", "APIkey", "mypassword", "pwd", "dsn"),
        *("api_key_value", "secret_id", "SECRET_KEY_BASE", "jwt", "session_id"),
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
        ("Authorization: Token x1\nHost: a", "Authorization: ***\nHost: a"),
        ('Authorization: Digest username="me", response="x1"', "Authorization: ***"),
        ("Cookie: a=1; session=x1\r\nHost: a", "Cookie: ***\r\nHost: a"),
        (r"{\"api_key\": \"x1 y\", \"b\": 2}", r"{\"api_key\": ***, \"b\": 2}"),
        (r'{"password": "x\"y z", "b": 2}', '{"password": ***, "b": 2}'),
        ('{"api_key":\n  "x y",\n"b": 2}', '{"api_key":\n  ***,\n"b": 2}'),
        ("[('api_key', 'x y'), ('b', 'c')]", "[('api_key', ***), ('b', 'c')]"),
        ("ran with --api-key x1 --steps 3", "ran with --api-key *** --steps 3"),
        ("POST api_key%3Dx1&b%3D2", "POST api_key%3D***"),
        ("postgres://u:p/w@host/a", "postgres://***@host/a"),
        ("token=1abc", "token=***"),
        (
            [{"name": "Authorization", "value": "x"}, {"name": "Host", "value": "a"}],
            [{"name": "Authorization", "value": "***"}, {"name": "Host", "value": "a"}],
        ),
        (
            '[{"name": "Authorization", "value": "x y"}, {"name": "Host", "value": "a"}]',
            '[{"name": "Authorization", "value": ***}, {"name": "Host", "value": "a"}]',
        ),
        (
            {"terms": {"password": {"weight": 1.0, "note": "a", "api_key": "x"}}},
            {"terms": {"password": {"weight": 1.0, "note": "a", "api_key": "***"}}},
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
    monkeypatch.setenv("SORT_KEY", "ascending")
    monkeypatch.setenv("JUPYTER_PASSWORD", "workspace")
    monkeypatch.setenv("PIN_SECRET", "12345678")
    monkeypatch.setenv("APP_CREDENTIALS", __file__)
    common = ["workspace/a", "12345678", __file__]
    assert redact(common) == common
    given = {"a": "hunter22/b", "b": ["hunter22hunter22"], "c": "ocr ascending"}
    assert redact(given) == {"a": "***/b", "b": ["***"], "c": "ocr ascending"}
    assert redact_command(["--name", "hunter22"]) == "--name ***"


def test_secrets_on_a_command_line() -> None:
    words = ["run.py", "--api-key", "x", "--steps", "3", "--token=y z", "--password", "--fast"]
    expected = "run.py --api-key *** --steps 3 --token=*** --password --fast"
    assert redact_command(words) == expected
    headers = "a.headers={Accept: b, X-Id: c d}"
    assert redact_command(["a='Cookie: b=c, d=e'"]) == "a='Cookie: ***"
    assert redact_command([headers, "key=left"]) == "a.headers=*** key=***"


@pytest.mark.parametrize("name", ["password", "secret", "headers", "my_credentials", "token"])
def test_the_name_of_a_reward_hides_nothing(name: str) -> None:
    config = {"reward": {"terms": {name: {"_target_": "a", "weight": 1.0}}}}
    assert redact(config) == config
    word = f"reward.terms.{name}={{weight: 1.0, note: a}}"
    assert redact(word) == word
    assert redact_command([word]) == word
    told = f"reward.terms.{name}={{weight: 1.0, api_key: ***}}"
    assert redact_command([told.replace("***", "x y")]) == told


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
        "eostoken": "</s>",
        "pair": ["token", "b1"],
        "score": "http://host:8000/score@v1",
        "usage": "pass --tokens a1, --sort-key b1 and (token, 1)",
        "item": {"name": "sharpness", "value": "high"},
        "commit": "9d2212f0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6",
    }
    assert redact(config) == config
    assert redact(json.dumps(config)) == json.dumps(config)


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a.", "a=", "a://", "://a:b", "eyJ", "eyJaaaaaaaaa-", "eyJaaaaaaaa.", "a?b=c&"),
        *("token=", "key:{", 'key:"', "key:[", "key:'\"", "key: 1 ", "('key',", '"key" ', "\\"),
        *(
            "--key ",
            "'key', 'value'",
            '"password":{',
            "sk-",
            "-----BEGIN PRIVATE KEY-----",
            "cookie: ]",
        ),
    ],
)
def test_a_long_text_takes_no_time(text: str) -> None:
    def seconds(times: int) -> float:
        before = time.process_time()
        redact(times * text)
        return time.process_time() - before

    # Four times the text would take 16 times as long if each place were read from all others.
    assert seconds(40_000) < 8 * seconds(10_000) + 0.5


@pytest.mark.parametrize("name", ["tiny_ocr", "token_grpo", "tiny_clip_ocr", "verl_omni"])
def test_settings_of_this_package_are_no_secrets(name: str) -> None:
    composed = compose_all(["model.path=a/b"], config_name=name)
    config = dataclasses.asdict(unchecked_config(composed.config))
    assert redact(config) == config
